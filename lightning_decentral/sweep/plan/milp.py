"""Mixed-integer program: min c x over A x <= b with some x whole numbers, by scipy's HiGHS (extra `schedule`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

UNSURE = 4  # HiGHS found a point whose rows are off by its tolerance and a rounding, and returns nothing
SCALES = (1.0, 3.0, 1 / 3)  # rows times another number are off by another one


class NoSolution(ValueError):
    """The solver found nothing in its time."""


@dataclass(frozen=True)
class Solution:
    """A feasible point.

    Args:
        gap: (cost - lower bound) / cost; 0 where it is proven to be the best.
    """

    values: tuple[float, ...]
    cost: float
    gap: float


@dataclass
class MILP:
    """A mixed-integer program, written row by row; every variable is at least 0."""

    costs: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    rows: list[tuple[Mapping[int, float], float, float]] = field(default_factory=list)

    def variable(self, cost: float = 0.0, upper: float = float("inf"), whole: bool = False) -> int:
        """A new one; its number."""
        self.costs.append(cost)
        self.upper.append(upper)
        self.whole.append(whole)
        return len(self.costs) - 1

    def binary(self) -> int:
        """A new one that is 0 or 1."""
        return self.variable(upper=1.0, whole=True)

    def between(self, terms: Mapping[int, float], low: float, high: float) -> None:
        """low <= sum of coefficient * variable <= high"""
        self.rows.append((terms, low, high))

    def equal(self, terms: Mapping[int, float], value: float) -> None:
        self.between(terms, value, value)

    def at_most(self, terms: Mapping[int, float], value: float) -> None:
        self.between(terms, -float("inf"), value)

    def solve(self, limit_seconds: float) -> Solution:
        """The best point found within the limit.

        Raises:
            NoSolution: none was found.
            ValueError: no scipy.
        """
        for scale in SCALES:
            found = self._solved(limit_seconds, scale)
            if found.status != UNSURE:
                break
        if found.x is None:
            raise NoSolution(f"no schedule within {limit_seconds:g} s ({found.message}): give the solver more time")
        return Solution(tuple(map(float, found.x)), float(found.fun), float(found.mip_gap or 0.0))

    def _solved(self, limit_seconds: float, scale: float) -> Any:
        """scipy's result, the rows multiplied by this number."""
        optimize, sparse = _scipy()
        entries = [(r, v, c) for r, (terms, _, _) in enumerate(self.rows) for v, c in terms.items()]
        rows, columns, values = zip(*entries, strict=True)
        shape = (len(self.rows), len(self.costs))
        places = np.array([rows, columns], dtype=np.int32)  # scipy 1.11 takes no wider ones
        matrix = sparse.csr_array((values, places), shape=shape)
        low, high = ([bounds[side] * scale for _, *bounds in self.rows] for side in (0, 1))
        return optimize.milp(
            self.costs,
            integrality=[int(whole) for whole in self.whole],
            bounds=optimize.Bounds([0.0] * len(self.costs), self.upper),
            constraints=optimize.LinearConstraint(matrix * scale, low, high),
            options={"time_limit": limit_seconds},
        )


def _scipy() -> tuple[Any, Any]:
    try:
        from scipy import optimize, sparse
    except ModuleNotFoundError:
        raise ValueError("exact schedules need scipy: pip install 'lightning-decentral[schedule]'") from None
    return optimize, sparse
