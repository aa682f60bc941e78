"""Depth assignments: how many of the top blocks each worker trains at a step (temporal, staircase, per worker).

A network is cut into `segments` pieces, counted from the bottom (inputs). A worker of depth d runs the backward of the
top d, and trains them all unless the assignment leaves some out (`selection`). Segment s has the contributors

    {rank : s in trained(rank, size, step, segments)}
"""

import math
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import ClassVar

from lightning_decentral.shared.plan.arguments import checked


@checked
@dataclass(frozen=True, kw_only=True)
class DepthAssignment(ABC):
    """Depth of each worker at each step: depth(rank, size, step, segments) in 1..segments; full during the warm-up.

    Args:
        warm_up: optimizer steps at full depth before the assignment begins; below one, a fraction of the whole run,
            which `timed` converts to steps.

    Raises:
        ValueError: a warm-up that is negative, or neither a fraction nor a number of steps.
    """

    warm_up: float = 0
    whole: ClassVar[bool] = False
    """True if a tied parameter gets its whole gradient, also from below its segment; else only the top `depth`'s."""

    def __post_init__(self) -> None:
        if not 0 <= self.warm_up < math.inf:
            raise ValueError(f"warm_up must be at least 0 steps, got {self.warm_up}: 0 begins at once")
        if self.warm_up > 1 and self.warm_up != round(self.warm_up):
            raise ValueError(f"warm_up must be whole steps or a fraction of the run below 1, got {self.warm_up}")

    def timed(self, total_steps: float) -> "DepthAssignment":
        """Convert a fractional warm-up to steps of a run: warm_up <- round(warm_up * total_steps).

        A fraction of a run without a known end (infinite or negative, as Lightning gives it) is 0 steps."""
        if not 0 < self.warm_up < 1:
            return self
        return replace(self, warm_up=round(self.warm_up * total_steps) if ended(total_steps) else 0)

    def depth(self, rank: int, size: int, step: int, segments: int) -> int:
        """Number of the top segments that this worker's backward goes through at this step."""
        return segments if step < self.warm_up else self.after(rank, size, step - int(self.warm_up), segments)

    def trained(self, rank: int, size: int, step: int, segments: int) -> tuple[int, ...]:
        """Segments that this worker trains at this step, from the bottom; the lowest is `segments - depth`.

        The highest segment is trained by all workers or by none."""
        return top(self.depth(rank, size, step, segments), segments)

    @abstractmethod
    def after(self, rank: int, size: int, step: int, segments: int) -> int:
        """Depth of this worker, with `step` counted from the end of the warm-up."""

    def reach(self, size: int, segments: int) -> int:
        """Largest depth of any worker after the warm-up."""
        return segments

    def share(self, rank: int, size: int) -> float:
        """This worker's fraction of a global batch; the sum over all workers is one."""
        return 1 / size


def ended(total_steps: float) -> bool:
    """Return whether a run with this number of steps has a known end: data without a length give infinity, or -1."""
    return 0 <= total_steps < math.inf


def top(depth: int, segments: int) -> tuple[int, ...]:
    """List the highest `depth` segments, from the bottom."""
    return tuple(range(segments - depth, segments))


def contributors(assignment: DepthAssignment, size: int, step: int, segments: int) -> list[tuple[int, ...]]:
    """Ranks that train each segment at this step, from the bottom."""
    trained = [assignment.trained(r, size, step, segments) for r in range(size)]
    return [tuple(r for r, own in enumerate(trained) if s in own) for s in range(segments)]


def check(assignment: DepthAssignment, size: int, segments: int) -> None:
    """Check that every segment has a contributor at some step; ValueError: the lowest segments never do."""
    reach = assignment.reach(size, segments)
    if reach < segments and assignment.warm_up == 0:
        raise ValueError(
            f"{assignment} never trains the lowest {segments - reach} of {segments} segments: "
            "give some worker at some step the full depth, or give a warm_up"
        )


def of_fraction(fraction: float, segments: int) -> int:
    """Depth of this fraction of the segments: max(1, ceil(fraction * segments))."""
    return max(1, math.ceil(fraction * segments - 1e-9))  # 0.07 * 100 is 7.000000000000001 in floats


def check_fractions(fractions: tuple[float, ...]) -> None:
    """Raise ValueError if a fraction isn't in (0, 1] or there is none."""
    wrong = [f for f in fractions if not 0 < f <= 1]
    if wrong or not fractions:
        raise ValueError(f"fractions must be in (0, 1] and at least one, got {fractions}: 1 is the full depth")


class Order(ABC):
    """Order of depths over steps: depth(step, segments) in 1..segments, a pure function."""

    @abstractmethod
    def depth(self, step: int, segments: int) -> int:
        """Number of the top segments that are trained at this step."""

    @abstractmethod
    def reach(self, segments: int) -> int:
        """Largest depth of all steps."""


@checked
@dataclass(frozen=True, kw_only=True)
class Cyclic(Order):
    """Fractions in turn: depth = ceil(f_t segments); with None all depths in turn: segments, ..., 2, 1.

    ValueError: a fraction outside of (0, 1]."""

    fractions: tuple[float, ...] | None = (1.0, 0.5)

    def __post_init__(self) -> None:
        if self.fractions is not None:
            check_fractions(tuple(self.fractions))

    def depth(self, step: int, segments: int) -> int:
        if self.fractions is None:
            return segments - step % segments
        return of_fraction(self.fractions[step % len(self.fractions)], segments)

    def reach(self, segments: int) -> int:
        return segments if self.fractions is None else of_fraction(max(self.fractions), segments)


@checked
@dataclass(frozen=True, kw_only=True)
class Random(Order):
    """Random depths: each from 1 to segments with probability 1 / segments, independent of other steps.

    Args:
        seed: of the sequence; the same on every worker.
    """

    seed: int = 0

    def depth(self, step: int, segments: int) -> int:
        # A function of seed and step: all workers agree without communication, also in a resumed run.
        return random.Random(f"{self.seed}/{step}").randint(1, segments)

    def reach(self, segments: int) -> int:
        return segments


@checked
@dataclass(frozen=True, kw_only=True)
class Full(DepthAssignment):
    """Full depth, depth = segments: ordinary data-parallel training."""

    def after(self, rank: int, size: int, step: int, segments: int) -> int:
        return segments


@checked
@dataclass(frozen=True, kw_only=True)
class Temporal(DepthAssignment):
    """The same depth on every worker: depth = order(step).

    All workers save compute and traffic in the same step, so the step gets shorter: (1 + 2 f) / 3 of a full step at
    fraction f of equal blocks. The largest depth sets the peak memory: with a warm-up, or an order with full steps
    such as the default, as much as `Full` needs. By default the first quarter of the run is at full depth."""

    warm_up: float = 0.25  # the order with the lowest loss in measurements (benchmarks/partial.py accuracy)
    order: Order = field(default_factory=Cyclic)

    def after(self, rank: int, size: int, step: int, segments: int) -> int:
        return self.order.depth(step, segments)

    def reach(self, size: int, segments: int) -> int:
        return self.order.reach(segments)


@checked
@dataclass(frozen=True, kw_only=True)
class Staircase(DepthAssignment):
    """Staircase of depths: depth = ceil((rank + 1) segments / size), so worker i of n trains the top i / n.

    Mean compute is (2n + 1) / (3n) of full for n equal segments. The deepest worker runs a full step, so a synchronous
    step isn't shorter: the other workers' devices are free for other work meanwhile.

    Source: the spatial variant of structured partial backpropagation, Kumar et al. 2111.10672."""

    def after(self, rank: int, size: int, step: int, segments: int) -> int:
        # ceil in whole numbers, without a float's rounding
        return -(-(rank + 1) * segments // size)


@checked
@dataclass(frozen=True, kw_only=True)
class Balanced(Staircase):
    """Staircase of depths, with batches in proportion to 1 / (1 + 2 i / n) for worker i = rank + 1 of n.

    A worker's step takes n_i (1 + 2 i / n) for equal segments: the same on all. Gradients are weighted by samples, so a
    segment's gradient is the mean over its contributors' samples. The warm-up has the same shares; an incomplete last
    batch of an epoch is left out."""

    def share(self, rank: int, size: int) -> float:
        # Independent of the step: loaders are made once, so the warm-up has these shares, too.
        rates = [1 / (1 + 2 * (r + 1) / size) for r in range(size)]
        return rates[rank] / sum(rates)


@checked
@dataclass(frozen=True, kw_only=True)
class PerWorker(DepthAssignment):
    """Fixed fractions for each worker, for devices of unequal speed: depth = ceil(f_rank segments).

    ValueError: a fraction outside of (0, 1]; at set-up, another number of fractions than of workers."""

    fractions: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fractions(tuple(self.fractions))

    def after(self, rank: int, size: int, step: int, segments: int) -> int:
        return of_fraction(self._checked(size)[rank], segments)

    def reach(self, size: int, segments: int) -> int:
        return of_fraction(max(self._checked(size)), segments)

    def _checked(self, size: int) -> tuple[float, ...]:
        if len(self.fractions) != size:
            raise ValueError(f"PerWorker has {len(self.fractions)} fractions for {size} workers: give one for each")
        return self.fractions
