"""Cost models fitted from a few measurements (as in TeraPipe): slices, the loss, messages, and a step's time.

    a chunk      t(i, j) = t(i, 0) + a0 + a1 i + a2 j + a3 i j      (j > 0; i tokens after j tokens of context)
    a message    latency + i / rate                                 between two stages

Source: TeraPipe 2102.07988, section 3.3."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import combinations

import numpy as np

from lightning_decentral.pipeline.plan.schedule import Action, Kind, Schedule, ScheduleForecast, forecast
from lightning_decentral.pipeline.plan.slicing import Situation


@dataclass(frozen=True)
class Measured:
    """Measured `seconds` of `tokens` tokens after `context` tokens."""

    tokens: int
    context: int
    seconds: float


@dataclass(frozen=True)
class CostModel:
    """Cost model: seconds(tokens, context). Without context, linear between measured points (and beyond the last)."""

    alone: tuple[tuple[int, float], ...]  # (tokens, seconds) without context, ascending, at least two
    coefficients: tuple[float, float, float, float]  # a0, a1, a2, a3
    error: float = 0.0  # the root mean square of (predicted - measured) / measured over the fitted measurements

    def __call__(self, tokens: int, context: int) -> float:
        """Predict the seconds of a slice: positive."""
        counts, seconds = zip(*self.alone, strict=True)
        found = float(np.interp(tokens, counts, seconds))
        if not counts[0] <= tokens <= counts[-1]:
            a, b = (0, 1) if tokens < counts[0] else (-2, -1)
            slope = (seconds[b] - seconds[a]) / (counts[b] - counts[a])
            found = float(seconds[a] + slope * (tokens - counts[a]))
        added = _row(tokens, context) @ np.array(self.coefficients) if context else 0.0
        # The fit may fall below zero, as a0 has any sign: at least half of the shortest measured slice's seconds, in
        # proportion for a shorter slice.
        least = 0.5 * seconds[0] * min(1.0, tokens / counts[0])
        return max(float(found + added), float(least))


def _row(tokens: int, context: int) -> np.ndarray:
    return np.array([1.0, tokens, context, tokens * context])


def fit(measurements: Iterable[Measured]) -> CostModel:
    """Fit the cost model with the least squared relative error. ValueError: fewer than two lengths without context, or
    fewer than four measurements with context."""
    alone: dict[int, list[float]] = {}
    with_context = []
    for m in measurements:
        if m.context:
            with_context.append(m)
        else:
            alone.setdefault(m.tokens, []).append(m.seconds)
    if len(alone) < 2 or len(with_context) < 4:
        raise ValueError(
            f"got {len(alone)} lengths without context and {len(with_context)} measurements with context: "
            "the fit needs at least 2 and 4"
        )
    points = _rising([(n, float(np.median(alone[n]))) for n in sorted(alone)])
    base = CostModel(points, (0.0, 0.0, 0.0, 0.0))
    # Each equation is divided by its measurement, so that short slices count as much as long ones.
    rows = np.stack([_row(m.tokens, m.context) / m.seconds for m in with_context])
    missing = np.array([1 - base(m.tokens, 0) / m.seconds for m in with_context])
    model = CostModel(points, _least_squares(rows, missing))
    errors = [model(m.tokens, m.context) / m.seconds - 1 for m in with_context]
    return replace(model, error=float(np.sqrt(np.mean(np.square(errors)))))


def _rising(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Fit the nearest points that never fall: falling neighbours both get their mean (isotonic regression)."""
    pools: list[tuple[float, int]] = []
    for _, seconds in points:
        pools.append((seconds, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, n), (b, m) = pools[-2:]
            pools[-2:] = [((a * n + b * m) / (n + m), n + m)]
    values = [mean for mean, count in pools for _ in range(count)]
    return tuple((tokens, value) for (tokens, _), value in zip(points, values, strict=True))


def _least_squares(rows: np.ndarray, wanted: np.ndarray) -> tuple[float, float, float, float]:
    """min |rows a - wanted|^2 with a1, a2, a3 >= 0: more tokens or context never cost less, despite noise."""
    scale = np.abs(rows).max(axis=0)  # tokens * context is a million times the constant
    best, residual = np.zeros(4), float("inf")
    # Every choice of zeros is tried: three coefficients give eight.
    for used in ([0, *some] for count in range(4) for some in combinations((1, 2, 3), count)):
        found = np.zeros(4)
        found[used] = np.linalg.lstsq(rows[:, used] / scale[used], wanted, rcond=None)[0]
        error = float(np.square(rows / scale @ found - wanted).sum())
        if (found[1:] >= 0).all() and error < residual:
            best, residual = found, error
    a0, a1, a2, a3 = (float(a) for a in best / scale)
    return a0, a1, a2, a3


@dataclass(frozen=True)
class Link:
    """Link between stages: seconds(tokens) = latency_seconds + token_seconds * tokens, from result to arrival."""

    latency_seconds: float = 0.0
    token_seconds: float = 0.0

    def __call__(self, tokens: int) -> float:
        return self.latency_seconds + self.token_seconds * tokens


def through(short: tuple[int, float], long: tuple[int, float]) -> Link:
    """Fit the line through two points (tokens, seconds); neither coefficient is below zero."""
    token_seconds = max(0.0, (long[1] - short[1]) / max(1, long[0] - short[0]))
    return Link(max(0.0, short[1] - token_seconds * short[0]), token_seconds)


@dataclass(frozen=True)
class StageCost:
    """Measured costs of one stage."""

    forward: CostModel
    backward: CostModel
    loss_seconds: float = 0.0  # of the loss over a whole micro-batch, forward and backward; 0 except on the last stage
    link: Link = Link()  # to the next stage and back; 0 for the last stage
    stretch: float = 1.0  # the largest factor by which a measured step exceeded the timeline of its parts


def action_seconds(profiles: Sequence[StageCost], slices: Sequence[int], action: Action) -> float:
    """Seconds of one action on its own stage; the last stage's last forward of a micro-batch includes the loss."""
    place = slices[action.slice], sum(slices[: action.slice])
    found = profiles[action.stage]
    if action.kind is Kind.BACKWARD:
        return found.backward(*place)
    closing = action.stage == len(profiles) - 1 and action.slice == len(slices) - 1
    return found.forward(*place) + (found.loss_seconds if closing else 0.0)


def message_seconds(links: Sequence[Link], slices: Sequence[int], action: Action) -> float:
    """Seconds of an action's message: forward over its own stage's link, backward over the previous stage's link."""
    link = action.stage if action.kind is Kind.FORWARD else action.stage - 1
    return links[link](slices[action.slice])


def expected(
    profiles: Sequence[StageCost], schedule: Schedule, num_microbatches: int, slices: Sequence[int]
) -> ScheduleForecast:
    """Forecast a training step from the stages' measured costs."""
    costs = cache(partial(action_seconds, profiles, slices))
    link = partial(message_seconds, [found.link for found in profiles], slices)
    # Costs are computed once for all micro-batches, which cost the same.
    first = lambda action: costs(Action(action.kind, action.stage, 0, action.slice))  # noqa: E731
    return forecast(schedule, len(profiles), num_microbatches, len(slices), first, link)


@dataclass(frozen=True, kw_only=True)
class Priced(Situation):
    """Situation whose steps are simulated with each stage's own costs, the loss and every link."""

    profiles: tuple[StageCost, ...]

    def step_seconds(self, slices: Sequence[int]) -> float:
        return expected(self.profiles, self.schedule, self.num_microbatches, slices).seconds


def priced(profiles: Sequence[StageCost], schedule: Schedule, num_microbatches: int) -> Priced:
    """Make the situation for which slices are planned when all stages are measured.

    error = sqrt(sum (e_k t_k)^2) / sum t_k        of the sum of fitted costs, t_k for a whole sequence
                                                   with independent errors e_k
    """
    tokens = profiles[0].forward.alone[-1][0]
    # The slowest stage's forward and backward together; one ratio splits it, as a situation has one for all stages.
    ratio = sum(p.backward(tokens, 0) for p in profiles) / sum(p.forward(tokens, 0) for p in profiles)
    fits = [costs for found in profiles for costs in (found.forward, found.backward)]
    whole = [costs(costs.alone[-1][0], 0) for costs in fits]
    off = math.hypot(*(costs.error * seconds for costs, seconds in zip(fits, whole, strict=True)))
    return Priced(
        num_stages=len(profiles),
        seconds=lambda i, j: max(p.forward(i, j) + p.backward(i, j) for p in profiles) / (1 + ratio),
        num_microbatches=num_microbatches,
        schedule=schedule,
        backward_over_forward=ratio,
        error=off / sum(whole),
        profiles=tuple(profiles),
    )
