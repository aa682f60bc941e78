"""Linear partition: cuts a row of blocks into contiguous pieces so that the largest piece is as small as possible.

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
    """Return costs [end, start]: the sum of sizes[start:end]; infinite where end <= start, which is no piece."""
    sums = np.array([0.0, *accumulate(sizes)])
    costs: Costs = sums[:, None] - sums[None, :]
    costs[np.triu_indices(len(sums))] = np.inf
    return costs


def linear_partition(costs: Costs, pieces: int) -> tuple[int, ...] | None:
    """Return boundaries 0, .., n of exactly `pieces` pieces with the smallest largest cost; None where there are none.

    Of equal partitions it takes that with the least sum of costs, then with the earliest last boundaries.

    Args:
        costs: [end, start], cost of every piece; infinite where start..end may not be a piece.
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
