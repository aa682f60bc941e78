"""Measured costs of a stage: its slices, the loss, messages between neighbours; and the step they foretell.

a chunk      t(i, j) of its stage        i tokens after j tokens of context
a message    latency + i / rate          between two stages
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from lightning_decentral.pipeline.plan.cost import CostModel
from lightning_decentral.pipeline.plan.schedule import Action, Costs, Kind, Schedule, ScheduleForecast, forecast
from lightning_decentral.pipeline.plan.slicing import Seconds, Situation


@dataclass(frozen=True)
class Link:
    """seconds(tokens) = latency_seconds + token_seconds * tokens, from a sender's result to the receiver's."""

    latency_seconds: float = 0.0
    token_seconds: float = 0.0

    def __call__(self, tokens: int) -> float:
        return self.latency_seconds + self.token_seconds * tokens


def through(short: tuple[int, float], long: tuple[int, float]) -> Link:
    """The line through two (tokens, seconds); neither number is below zero."""
    token_seconds = max(0.0, (long[1] - short[1]) / max(1, long[0] - short[0]))
    return Link(max(0.0, short[1] - token_seconds * short[0]), token_seconds)


@dataclass(frozen=True)
class StageCost:
    """A stage's costs, by the clock.

    Args:
        loss_seconds: of the loss over a whole micro-batch, there and back; 0 but on the last stage.
        link: to the next stage and back; 0 behind the last one.
        stretch: the largest factor by which a step took longer than the timeline of its parts: 1 where nothing
            disturbed.
    """

    forward: CostModel
    backward: CostModel
    loss_seconds: float = 0.0
    link: Link = Link()
    stretch: float = 1.0

    def seconds(self, tokens: int, context: int) -> float:
        """Forward and backward of a slice."""
        return self.forward(tokens, context) + self.backward(tokens, context)


def slowest(profiles: Sequence[StageCost]) -> tuple[Seconds, float]:
    """(seconds(tokens, context) forward on the slowest stage, how much longer a backward takes)."""
    tokens = profiles[0].forward.alone[-1][0]
    # The slowest there and back together; one ratio splits it, as a situation has one for all stages.
    ratio = sum(p.backward(tokens, 0) for p in profiles) / sum(p.forward(tokens, 0) for p in profiles)
    return lambda i, j: max(p.seconds(i, j) for p in profiles) / (1 + ratio), ratio


def action_seconds(profiles: Sequence[StageCost], slices: Sequence[int], action: Action) -> float:
    """Seconds of one action on its own stage; the last forward of a micro-batch on the last stage includes the loss."""
    place = slices[action.slice], sum(slices[: action.slice])
    found = profiles[action.stage]
    if action.kind is Kind.BACKWARD:
        return found.backward(*place)
    closing = action.stage == len(profiles) - 1 and action.slice == len(slices) - 1
    return found.forward(*place) + (found.loss_seconds if closing else 0.0)


def message_seconds(links: Sequence[Link], slices: Sequence[int], action: Action) -> float:
    """Seconds of an action's message: forward over its own stage's link, backward over that of the stage before."""
    link = action.stage if action.kind is Kind.FORWARD else action.stage - 1
    return links[link](slices[action.slice])


def _once(costs: Costs) -> Costs:
    """Asked once for all micro-batches, which cost the same."""
    found: dict[tuple[int, Kind, int], float] = {}

    def seconds(action: Action) -> float:
        place = action.stage, action.kind, action.slice
        if place not in found:
            found[place] = costs(action)
        return found[place]

    return seconds


def expected(
    profiles: Sequence[StageCost], schedule: Schedule, num_microbatches: int, slices: Sequence[int]
) -> ScheduleForecast:
    """The timeline of a step."""
    costs = _once(partial(action_seconds, profiles, slices))
    link = partial(message_seconds, [found.link for found in profiles], slices)
    return forecast(schedule, len(profiles), num_microbatches, len(slices), costs, link)


@dataclass(frozen=True, kw_only=True)
class Priced(Situation):
    """A situation whose steps are simulated with each stage's own costs, the loss and every link."""

    profiles: tuple[StageCost, ...]

    def step_seconds(self, slices: Sequence[int]) -> float:
        return expected(self.profiles, self.schedule, self.num_microbatches, slices).seconds


def priced(profiles: Sequence[StageCost], schedule: Schedule, num_microbatches: int) -> Priced:
    """Situation that slices are planned for where all stages are measured.

    error = sqrt(sum (e_k t_k)^2) / sum t_k        of the sum of what is fitted, t_k for a whole sequence, e_k off each
                                                   and independently
    """
    seconds, ratio = slowest(profiles)
    fits = [costs for found in profiles for costs in (found.forward, found.backward)]
    whole = [costs(costs.alone[-1][0], 0) for costs in fits]
    off = math.hypot(*(costs.error * seconds for costs, seconds in zip(fits, whole, strict=True)))
    return Priced(
        num_stages=len(profiles),
        seconds=seconds,
        num_microbatches=num_microbatches,
        schedule=schedule,
        backward_over_forward=ratio,
        error=off / sum(whole),
        profiles=tuple(profiles),
    )
