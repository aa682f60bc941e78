"""Linear partition: cuts a row of blocks into contiguous pieces so that the largest piece is as small as possible.

    largest(i, c) = min_j max(largest(j, c - 1), costs[i, j])          costs[end, start] of the piece start..end
    total(i, c)   = min_j { total(j, c - 1) + costs[i, j] | costs[i, j] <= largest(n, pieces) }

Two dynamic programs, exact, in O(pieces n^2). Stages of a pipeline, slices of a sequence, segments of a network and
shards of a step are cut by it."""

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


def balanced_partition(sizes: Sequence[float], pieces: int) -> tuple[int, ...]:
    """Return boundaries 0, .., n of at most n non-empty pieces whose largest sum is as small as possible; among equally
    good partitions, with the least sum of squares."""
    # Squared, as plain sums have the same total for all partitions and couldn't decide between equals.
    at = linear_partition(piece_sums(sizes) ** 2, pieces)
    assert at is not None  # callers have as many blocks
    return at


def linear_partition(costs: Costs, pieces: int) -> tuple[int, ...] | None:
    """Return boundaries 0, .., n of exactly `pieces` pieces with the smallest largest cost; None where there are none.
    Of equal partitions it takes that with the least sum of costs, then with the earliest last boundaries. `costs`:
    [end, start], of every piece; infinite where start..end may not be a piece."""
    count = len(costs)
    if not 1 <= pieces <= count - 1:
        return None
    largest = np.full(count, np.inf)
    largest[0] = 0.0
    for _ in range(pieces):
        largest = np.maximum(costs, largest[None, :]).min(axis=1)
    best, before = cheapest_ways(np.where(costs <= largest[-1], costs, np.inf), pieces)
    return boundaries(before[1:]) if np.isfinite(best[pieces, -1]) else None


def cheapest_ways(costs: Costs, pieces: int) -> tuple[Costs, NDArray[np.int64]]:
    """Least sum of costs, and the boundary before, of c pieces that end at a boundary: [c, end], c up to `pieces`."""
    shape = pieces + 1, len(costs)
    best, before = np.full(shape, np.inf), np.zeros(shape, dtype=np.int64)
    best[0, 0] = 0.0
    for c in range(1, pieces + 1):
        sums = costs + best[c - 1][None, :]
        before[c], best[c] = sums.argmin(axis=1), sums.min(axis=1)
    return best, before


def boundaries(before: NDArray[np.int64]) -> tuple[int, ...]:
    """Return the boundaries 0, .., n of as many pieces as there are rows of `cheapest_ways`."""
    at = [before.shape[1] - 1]
    for row in before[::-1]:
        at.append(int(row[at[-1]]))
    return tuple(reversed(at))
