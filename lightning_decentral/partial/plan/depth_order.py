"""Depth schedules over the steps (cyclic, random), where all workers have the same depth at a step."""

import math
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass

from lightning_decentral.shared.plan.arguments import checked


def of_fraction(fraction: float, segments: int) -> int:
    """max(1, ceil(fraction * segments)): the depth that holds this fraction of the segments."""
    return max(1, math.ceil(fraction * segments - 1e-9))  # 0.07 * 100 is 7.000000000000001 in floats


def check_fractions(fractions: tuple[float, ...]) -> None:
    """ValueError where a fraction isn't in (0, 1] or there is none."""
    wrong = [f for f in fractions if not 0 < f <= 1]
    if wrong or not fractions:
        raise ValueError(f"fractions must be in (0, 1] and at least one, got {fractions}: 1 is the full depth")


class Order(ABC):
    """depth(step, segments) in 1..segments, a pure function."""

    @abstractmethod
    def depth(self, step: int, segments: int) -> int:
        """Number of the top segments that are trained at this step."""

    @abstractmethod
    def reach(self, segments: int) -> int:
        """The largest depth that ever comes."""


@checked
@dataclass(frozen=True, kw_only=True)
class Cyclic(Order):
    """depth = ceil(f_t segments), f_t the fractions in turn; with None all depths in turn: segments, ..., 2, 1.

    Raises:
        ValueError: a fraction outside of (0, 1].
    """

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
    """Every depth from 1 to segments with probability 1 / segments, independent of the others.

    Args:
        seed: of the sequence; the same on every worker.
    """

    seed: int = 0

    def depth(self, step: int, segments: int) -> int:
        # Of seed and step alone: all workers agree without asking, and a resumed run goes on with the same depths.
        return random.Random(f"{self.seed}/{step}").randint(1, segments)

    def reach(self, segments: int) -> int:
        return segments
