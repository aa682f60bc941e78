"""Linear partition: a row of blocks cut into contiguous pieces, the largest piece as small as can be.

    largest(i, c) = min_j max(largest(j, c - 1), costs[i, j])          costs[end, start] of the piece start..end
    total(i, c)   = min_j { total(j, c - 1) + costs[i, j] | costs[i, j] <= largest(n, pieces) }

Two dynamic programs, exact, in O(pieces n^2). Stages of a pipeline, slices of a sequence, segments of a network and
shards of a step are cut by it.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

Costs = NDArray[np.float64]


def piece_sums(sizes: Sequence[float]) -> Costs:
    """[end, start]: the sum of sizes[start:end]; infinite where end <= start, which is no piece."""
    sums = np.array([0.0, *accumulate(sizes)])
    costs: Costs = sums[:, None] - sums[None, :]
    costs[np.triu_indices(len(sums))] = np.inf
    return costs


def linear_partition(costs: Costs, pieces: int) -> tuple[int, ...] | None:
    """Boundaries 0, .., n of exactly `pieces` pieces whose largest cost is smallest; None: there are none.

    Of equals the least sum of costs, then the earliest last boundaries.

    Args:
        costs: [end, start] of every piece; infinite where it may not be one.
    """
    count = len(costs)
    if not 1 <= pieces <= count - 1:
        return None
    largest = np.full(count, np.inf)
    largest[0] = 0.0
    for _ in range(pieces):
        largest = np.maximum(costs, largest[None, :]).min(axis=1)
    allowed = np.where(costs <= largest[-1], costs, np.inf)
    best = np.full(count, np.inf)
    best[0] = 0.0
    steps = []
    for _ in range(pieces):
        sums = allowed + best[None, :]
        steps.append(sums.argmin(axis=1))
        best = sums.min(axis=1)
    if not np.isfinite(best[-1]):
        return None
    at = [count - 1]
    for before in reversed(steps):
        at.append(int(before[at[-1]]))
    return tuple(reversed(at))
