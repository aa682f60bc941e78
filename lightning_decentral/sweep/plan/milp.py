"""Mixed-integer program: min c x over A x <= b with some x integers, by scipy's HiGHS (extra `schedule`)."""

from collections.abc import Mapping

import numpy as np

UNSURE = 4  # HiGHS found a point whose rows are off by its tolerance and a rounding, and returns nothing
SCALES = (1.0, 3.0, 1 / 3)  # rows times another number are off by another one


class NoSolution(ValueError):
    """Error: the solver found no solution within its time."""


class MILP:
    """Mixed-integer program, built row by row; every variable is at least 0."""

    def __init__(self) -> None:
        self._variables: list[tuple[float, float, int]] = []  # (cost, upper bound, whether it is a whole number)
        self._rows: list[tuple[Mapping[int, float], float, float]] = []  # (terms, lower bound, upper bound)

    def variable(self, cost: float = 0.0) -> int:
        """Add a variable of this cost; return its number."""
        self._variables.append((cost, float("inf"), 0))
        return len(self._variables) - 1

    def binary(self) -> int:
        """Add a variable that is 0 or 1; return its number."""
        self._variables.append((0.0, 1.0, 1))
        return len(self._variables) - 1

    def equal(self, terms: Mapping[int, float], value: float) -> None:
        """Add the row: sum of coefficient * variable = value."""
        self._rows.append((terms, value, value))

    def at_most(self, terms: Mapping[int, float], value: float) -> None:
        """Add the row: sum of coefficient * variable <= value."""
        self._rows.append((terms, -float("inf"), value))

    def solve(self, limit_seconds: float) -> tuple[tuple[float, ...], float]:
        """Return the best point found within the limit, and a lower bound of every point's cost. NoSolution: no point
        was found. ValueError: scipy is missing."""
        try:
            from scipy import optimize, sparse
        except ModuleNotFoundError:
            raise ValueError("exact schedules need scipy: pip install 'lightning-decentral[schedule]'") from None
        costs, upper, whole = zip(*self._variables, strict=True)
        terms, *bounds = zip(*self._rows, strict=True)
        entries = [(r, v, c) for r, row in enumerate(terms) for v, c in row.items()]
        rows, columns, values = zip(*entries, strict=True)
        places = np.array([rows, columns], dtype=np.int32)  # scipy 1.11 takes no wider ones
        matrix = sparse.csr_array((values, places), shape=(len(terms), len(costs)))
        low, high = map(np.array, bounds)
        for scale in SCALES:
            found = optimize.milp(
                costs,
                integrality=whole,
                bounds=optimize.Bounds([0.0] * len(costs), upper),
                constraints=optimize.LinearConstraint(matrix * scale, low * scale, high * scale),
                options={"time_limit": limit_seconds},
            )
            if found.status != UNSURE:
                break
        if found.x is None:
            raise NoSolution(f"no schedule within {limit_seconds:g} s ({found.message}): give the solver more time")
        # The gap: (cost - lower bound) / cost; 0 where the point is proven to be the best.
        return tuple(map(float, found.x)), float(found.fun) * (1 - float(found.mip_gap or 0.0))
