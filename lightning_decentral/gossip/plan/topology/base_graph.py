"""Base-(k+1) graphs: W_1 W_2 ... W_m = 1 1^T / n exactly, for every n, with at most k peers per worker and step.

A step is written as its pairs and their weights, `{(i, j): w}` with i < j; the rest of each row is the worker's own. So
every step is symmetric, and doubly stochastic by construction. Workers are always listed in ascending order.

Source: Takezawa et al. 2305.11420, algorithms 1 (hyper-hypercube), 2 (simple) and 3 (full).
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain, combinations
from math import fsum, prod

Pairs = dict[tuple[int, int], float]
Rows = tuple[dict[int, float], ...]


@lru_cache(maxsize=64)
def base_graph(size: int, max_degree: int) -> tuple[Rows, ...]:
    """[step][rank] -> {j: w_ij}, the rank itself included; at most 2 log_{k+1} n + 2 steps, at least one.

    With n = p q, p the largest divisor whose primes are all at most k + 1: a simple graph inside each of p groups of q
    workers, then a hyper-hypercube over the groups; or the simple graph over all where that is shorter (algorithm 3).
    """
    smooth = prod(_factors(size, max_degree + 1))
    rough = size // smooth
    groups = [range(i * rough, (i + 1) * rough) for i in range(smooth)]
    inside = _side_by_side(_simple(group, max_degree) for group in groups)
    across = _side_by_side(_hyper_hypercube([group[j] for group in groups], max_degree) for j in range(rough))
    whole = _simple(range(size), max_degree)
    steps = min(inside + across, whole, key=len) or [{}]
    return tuple(_rows(step, size) for step in steps)


def _rows(step: Pairs, size: int) -> Rows:
    rows: Rows = tuple({} for _ in range(size))
    for (i, j), weight in step.items():
        rows[i][j] = rows[j][i] = weight
    return tuple({**row, rank: 1 - fsum(row.values())} for rank, row in enumerate(rows))


def _side_by_side(plans: Iterable[list[Pairs]]) -> list[Pairs]:
    """Plans of equal length over disjoint workers, at the same time."""
    return [_union(steps) for steps in zip(*plans, strict=True)]


def _union(steps: Iterable[Pairs]) -> Pairs:
    return dict(chain.from_iterable(step.items() for step in steps))


def _factors(number: int, largest: int) -> list[int]:
    """Few factors in 2..largest, greedily; their product is the largest divisor without greater primes."""
    found = []
    for factor in range(largest, 1, -1):
        while number % factor == 0:
            found.append(factor)
            number //= factor
    return found


def _hyper_hypercube(workers: Sequence[int], max_degree: int) -> list[Pairs]:
    """Number the workers in mixed radix; step d averages those that differ in digit d only (algorithm 1).

    The number of workers has no prime factor above max_degree + 1.
    """
    steps, stride = [], 1
    for factor in _factors(len(workers), max_degree + 1):
        cliques: dict[tuple[int, int], list[int]] = {}
        for index, worker in enumerate(workers):
            cliques.setdefault((index // (stride * factor), index % stride), []).append(worker)
        steps.append({pair: 1 / factor for clique in cliques.values() for pair in combinations(clique, 2)})
        stride *= factor
    return steps


def _simple(workers: Sequence[int], max_degree: int) -> list[Pairs]:
    """Algorithm 2, with n = a_1 b^p_1 + ... + a_L b^p_L in base b = k + 1 and a block of workers for each term.

    First every block finds its own mean. Then block l = 1, 2, ... gives its share to all later blocks, each of their
    workers paired with one worker of each of the a_l pieces of block l. Then every piece has the mean of all, and finds
    it.
    """
    if prod(_factors(len(workers), max_degree + 1)) == len(workers):
        return _hyper_hypercube(workers, max_degree)
    blocks = _blocks(workers, max_degree + 1)
    means = [_hyper_hypercube(_joined(pieces), max_degree) for pieces in blocks]
    ends = [_side_by_side(_hyper_hypercube(piece, max_degree) for piece in pieces) for pieces in blocks]
    ends[-1] = means[-1]
    start, last = len(means[0]), len(blocks) - 1

    def of_block(block: int, step: int) -> Pairs:
        since_spread = step - start - min(block + 1, last)
        if step < start:
            return _cycled(means[block], step)
        if block < last and step == start + block:
            return _spread(blocks[block:])
        return _cycled(ends[block], since_spread) if since_spread >= 0 else {}

    return [_union(of_block(b, step) for b in range(len(blocks))) for step in range(start + 1 + len(ends[0]))]


def _blocks(workers: Sequence[int], base: int) -> list[list[Sequence[int]]]:
    """A block for each nonzero digit of the number of workers, highest first: [block][piece] -> base ** p workers."""
    power = 1
    while power * base <= len(workers):
        power *= base
    blocks, start = [], 0
    while power:
        digit = (len(workers) - start) // power
        pieces = [workers[start + i * power : start + (i + 1) * power] for i in range(digit)]
        blocks += [pieces] if pieces else []
        start, power = start + digit * power, power // base
    return blocks


def _joined(pieces: Iterable[Sequence[int]]) -> list[int]:
    return list(chain.from_iterable(pieces))


def _spread(blocks: Sequence[Sequence[Sequence[int]]]) -> Pairs:
    """The first block gives |V_1| / sum_j |V_j| to every worker of the later ones, in equal parts from its pieces."""
    pieces, later = blocks[0], _joined(_joined(block) for block in blocks[1:])
    own = sum(map(len, pieces))
    weight = own / (own + len(later)) / len(pieces)
    return {(piece[i], worker): weight for piece in pieces for i, worker in enumerate(later)}


def _cycled(steps: Sequence[Pairs], step: int) -> Pairs:
    """A block that already has its mean keeps mixing: no change to the means, a closer agreement while training."""
    return steps[step % len(steps)] if steps else {}
