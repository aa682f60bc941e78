"""TeraPipe's dynamic program: cut a line into pieces of least cost under a bound, exact for any costs.

whole(t) = min { sum of the pieces' costs | every piece costs at most t }
best     = min over t of  whole(t) + factor * t"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, pairwise

import numpy as np

from lightning_decentral.shared.plan.arguments import at_least
from lightning_decentral.shared.plan.linear_partition import Costs, boundaries, cheapest_ways


def table(boundaries: Sequence[int], seconds: Callable[[int, int], float]) -> Costs:
    """Cost table: [end, start] is seconds(tokens, context) of the piece between two boundaries; else infinite.
    ValueError: a cost that isn't a positive, finite number."""
    count = len(boundaries)
    costs = np.full((count, count), np.inf)
    for start, end in combinations(range(count), 2):
        tokens, context = boundaries[end] - boundaries[start], boundaries[start]
        costs[end, start] = cost = float(seconds(tokens, context))
        if not 0 < cost < np.inf:
            raise ValueError(f"seconds({tokens}, {context}) must be positive and finite, got {cost}")
    return costs


@dataclass(frozen=True)
class Cuts:
    """Cut of a line: indices of its boundaries, including both ends, and the sum of its pieces' costs."""

    seconds: float
    at: tuple[int, ...]


def cheapest(costs: Costs, bound: float, max_pieces: int) -> Cuts | None:
    """Find the cut min { sum of costs | each at most bound, at most max_pieces }; among equals, the fewest pieces.

        whole(i, c) = min_j { whole(j, c - 1) + cost(j..i) | cost(j..i) <= bound }

    Source: TeraPipe 2102.07988, equation 5, with a count of pieces."""
    # No cut has more pieces than there are positions to cut at.
    best, before = cheapest_ways(np.where(costs <= bound, costs, np.inf), min(max_pieces, len(costs) - 1))
    pieces = int(best[:, -1].argmin())
    if not np.isfinite(best[pieces, -1]):
        return None
    return Cuts(float(best[pieces, -1]), boundaries(before[1 : pieces + 1]))


def over_bounds(candidates: Sequence[float], whole: Callable[[float], Cuts | None], factor: float) -> Cuts | None:
    """Return the cut that attains min over t in candidates of whole(t) + factor * t, exactly; None if no bound works.
    `whole`: returns the best cut under bound t; its cost never grows with t."""
    bounds = sorted(set(candidates))
    best: tuple[float, Cuts] | None = None
    intervals = [(0, len(bounds) - 1)]
    while intervals:
        low, high = intervals.pop()
        if low > high:
            continue
        at_high = whole(bounds[high])
        if at_high is None:
            continue  # no smaller bound is possible either
        value = at_high.seconds + factor * bounds[high]
        if best is None or value < best[0]:
            best = value, at_high
        # No t in [low, high] is better than whole(high) + factor * low: the published loop, most of it skipped.
        if low < high and at_high.seconds + factor * bounds[low] < best[0]:
            middle = (low + high) // 2
            intervals += [(middle + 1, high - 1), (low, middle)]
    return None if best is None else best[1]


def piece_boundaries(length_tokens: int, granularity: int) -> list[int]:
    """Boundaries of pieces of this size, including both ends; the last piece is shorter if the size doesn't divide the
    length. ValueError: a number below 1."""
    at_least_1(length_tokens=length_tokens, granularity=granularity)
    return [*range(0, length_tokens, granularity), length_tokens]


def lengths(boundaries: Sequence[int], at: Sequence[int]) -> tuple[int, ...]:
    return tuple(boundaries[b] - boundaries[a] for a, b in pairwise(at))


at_least_1 = partial(at_least, 1, "give 1 or more")
