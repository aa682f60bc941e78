"""Token slicing policies: where a sequence is cut so that its slices keep all stages busy.

    t_i = seconds(l_i, l_1 + .. + l_(i-1));   T = sum t_i + (P - 1) max t_j

A later token attends to more context, so equal lengths are not equal costs: slices get shorter towards the end."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lightning_decentral.pipeline.plan.dynamic_program import (
    at_least_1,
    cheapest,
    lengths,
    over_bounds,
    piece_boundaries,
    table,
)
from lightning_decentral.pipeline.plan.schedule import (
    Kind,
    OneForwardOneBackward,
    Schedule,
    always,
    forecast,
    in_flight,
)
from lightning_decentral.shared.plan.arguments import at_least, checked
from lightning_decentral.shared.plan.linear_partition import linear_partition

Seconds = Callable[[int, int], float]
BACKWARD_OVER_FORWARD = 2.0  # a backward multiplies two matrices for each that the forward multiplies


def plan(
    length_tokens: int, num_stages: int, seconds: Seconds, *, granularity: int = 1, max_slices: int | None = None
) -> tuple[int, ...]:
    """Find the slices l_1, l_2, .. that minimise sum t_i + (num_stages - 1) max t_j, exactly. `seconds`:
    seconds(tokens, context) of one slice on one stage: positive. `granularity`: slices are multiples of it, except the
    last if it doesn't divide the length. ValueError: a number below 1.

    Source: TeraPipe 2102.07988, algorithm 1."""
    boundaries = piece_boundaries(length_tokens, granularity)
    at_least_1(num_stages=num_stages, max_slices=1 if max_slices is None else max_slices)
    costs = table(boundaries, seconds)
    most = len(boundaries) if max_slices is None else max_slices
    candidates = costs[costs < float("inf")].tolist()
    cuts = over_bounds(candidates, lambda bound: cheapest(costs, bound, most), num_stages - 1)
    assert cuts is not None  # one slice is always possible
    return lengths(boundaries, cuts.at)


def balance(length_tokens: int, num_slices: int, seconds: Seconds, *, granularity: int = 1) -> tuple[int, ...]:
    """Cut into exactly `num_slices` slices whose largest cost is smallest. ValueError: more slices than pieces of this
    granularity."""
    boundaries = piece_boundaries(length_tokens, granularity)
    at_least_1(num_slices=num_slices)
    at = linear_partition(table(boundaries, seconds), num_slices)
    if at is None:
        raise ValueError(
            f"{length_tokens} tokens are {len(boundaries) - 1} pieces of {granularity}, fewer than {num_slices} "
            "slices: ask for fewer slices or a smaller granularity"
        )
    return lengths(boundaries, at)


@checked
@dataclass(frozen=True, kw_only=True)
class Situation:
    """Costs and limits for which slices are planned.

    Args:
        seconds: seconds(tokens, context) forward of one slice on the slowest stage.
        backward_over_forward: seconds of a backward, divided by seconds of a forward.
        link_seconds: until the next stage has a result.
        max_tokens_in_flight: maximum of tokens whose activations the first stage may keep.
        error: of simulated steps, relative: smaller differences don't count.
    """

    num_stages: int
    seconds: Seconds
    num_microbatches: int = 1
    schedule: Schedule = field(default_factory=OneForwardOneBackward)
    backward_over_forward: float = BACKWARD_OVER_FORWARD
    link_seconds: float = 0.0
    max_tokens_in_flight: int | None = None
    error: float = 0.0

    def __post_init__(self) -> None:
        at_least_1(num_stages=self.num_stages, num_microbatches=self.num_microbatches)
        at_least(1, "leave it out for no bound", max_tokens_in_flight=self.max_tokens_in_flight)
        factors = {"backward_over_forward": self.backward_over_forward, "error": self.error}
        at_least(0, "leave it out for the default", link_seconds=self.link_seconds, **factors)

    def step_seconds(self, slices: Sequence[int]) -> float:
        """Forecast the seconds of a training step with these slices, by the timeline."""
        contexts = [sum(slices[:i]) for i in range(len(slices))]
        forward = [self.seconds(tokens, context) for tokens, context in zip(slices, contexts, strict=True)]
        longer = {Kind.FORWARD: 1.0, Kind.BACKWARD: self.backward_over_forward}
        sizes = (self.num_stages, self.num_microbatches, len(slices))
        costs = lambda action: longer[action.kind] * forward[action.slice]  # noqa: E731  # the same on every stage
        return forecast(self.schedule, *sizes, costs, always(self.link_seconds)).seconds

    def held(self, slices: Sequence[int]) -> int:
        """Maximum of tokens whose activations the first stage, which keeps most, has at once."""
        first = self.schedule.actions(self.num_stages, self.num_microbatches, len(slices))[0]
        return in_flight(first, slices)


def equal(length_tokens: int, num_slices: int, *, granularity: int = 1) -> tuple[int, ...]:
    """Cut into slices of equal length; otherwise the first slices are longer by `granularity`. ValueError: more slices
    than pieces of this granularity."""
    boundaries = piece_boundaries(length_tokens, granularity)
    at_least_1(num_slices=num_slices)
    short, longer = divmod(len(boundaries) - 1, num_slices)
    if short == 0:
        raise ValueError(f"{length_tokens} tokens can't be cut into {num_slices} slices: ask for fewer")
    return lengths(boundaries, [k * short + min(k, longer) for k in range(num_slices + 1)])


class Slicing(ABC):
    """Policy that cuts a sequence into slices; a frozen value that doesn't depend on the length."""

    measures: bool = False
    """True if the policy needs `situation.seconds` from measurements of the real model."""

    @abstractmethod
    def slices(self, length_tokens: int, situation: Situation) -> tuple[int, ...]:
        """Lengths of the slices: positive, with sum `length_tokens`. ValueError if the policy can't cut this length."""


@checked
@dataclass(frozen=True)
class Uniform(Slicing):
    """Cut into `n` slices of equal length; if n doesn't divide the length, the first slices are a token longer."""

    n: int = 8

    def __post_init__(self) -> None:
        at_least_1(n=self.n)

    def slices(self, length_tokens: int, situation: Situation) -> tuple[int, ...]:
        return equal(length_tokens, self.n)


@checked
@dataclass(frozen=True)
class Balanced(Slicing):
    """Cut into `n` slices of equal cost, by a cost model fitted from measurements of the real model.

    Args:
        granularity: slices are multiples of it.
    """

    n: int = 8
    granularity: int = 8
    measures = True

    def __post_init__(self) -> None:
        at_least_1(n=self.n, granularity=self.granularity)

    def slices(self, length_tokens: int, situation: Situation) -> tuple[int, ...]:
        return balance(length_tokens, self.n, situation.seconds, granularity=self.granularity)


@checked
@dataclass(frozen=True, kw_only=True)
class Planned(Slicing):
    """Cut so that a simulated step is shortest within the memory bound, by measurements of the real model.

    Among slices within the situation's error, the fewest are taken. Candidates are slices of equal cost (`balance`) and
    of equal length for every number up to `max_slices`, and `plan`. The result isn't proven to be optimal under 1F1B,
    whose makespan has no closed form for unequal slices; it's never worse than a candidate by more than the error.

    Args:
        granularity: slices are multiples of it.
        max_slices: maximum number of slices.

    Raises:
        ValueError: while planning, no candidate fits into the memory bound.

    Source of the choice among equals: the one-standard-error rule for the sizes of trees, Breiman et al.,
    Classification and Regression Trees, 1984.
    """

    granularity: int = 8
    max_slices: int = 16
    measures = True

    def __post_init__(self) -> None:
        at_least_1(granularity=self.granularity, max_slices=self.max_slices)

    def slices(self, length_tokens: int, situation: Situation) -> tuple[int, ...]:
        each = {"granularity": self.granularity}
        most = min(self.max_slices, len(piece_boundaries(length_tokens, self.granularity)) - 1)
        tried = [balance(length_tokens, n, situation.seconds, **each) for n in range(1, most + 1)]
        tried += [equal(length_tokens, n, **each) for n in range(1, most + 1)]
        tried.append(plan(length_tokens, situation.num_stages, situation.seconds, max_slices=most, **each))
        allowed = situation.max_tokens_in_flight
        fitting = [slices for slices in dict.fromkeys(tried) if allowed is None or situation.held(slices) <= allowed]
        if not fitting:
            raise ValueError(
                f"no plan with at most {self.max_slices} slices keeps at most {allowed} tokens on the "
                "first stage: allow more tokens or slices, or use the one-forward-one-backward schedule"
            )
        seconds = {slices: situation.step_seconds(slices) for slices in fitting}
        fastest = min(fitting, key=seconds.__getitem__)
        # Fewer slices load network and machine less; seconds within the error mustn't cost memory either.
        good = [slices for slices in fitting if seconds[slices] <= (1 + situation.error) * seconds[fastest]]
        frugal = [slices for slices in good if situation.held(slices) <= situation.held(fastest)]
        return min(frugal, key=lambda slices: (len(slices), seconds[slices]))


@checked
@dataclass(frozen=True)
class Given(Slicing):
    """Cut into slices of given lengths, in tokens."""

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", tuple(self.lengths))  # a list from a configuration
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"lengths must be positive, got {self.lengths}: give tokens of each slice")

    def slices(self, length_tokens: int, situation: Situation) -> tuple[int, ...]:
        if sum(self.lengths) != length_tokens:
            raise ValueError(
                f"slices {self.lengths} sum to {sum(self.lengths)}, but the sequence has {length_tokens} tokens: "
                "give lengths with that sum, pad to one length, or use Uniform, Balanced or Planned, which replan"
            )
        return self.lengths
