"""Topologies of one or few peers a step: one-peer ring and exponential, hypercube, base-(k+1) graphs, random matching.

Most reach exact consensus in finite time: W_1 W_2 ... W_m = 1 1^T / n."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, combinations
from math import prod
from random import Random

from lightning_decentral.gossip.plan.topology.topology import Topology, at_least_one, ceil_log2, completed, others
from lightning_decentral.shared.plan.arguments import checked


@dataclass(frozen=True)
class OnePeerRing(Topology):
    """A ring where workers exchange with one side, then the other: pairs (i, i + 1) with i - step even, weights 1/2.

    With an odd number of workers one is alone in each step, in turn. Exact consensus for 2 and 4 workers only."""

    def period(self, size: int) -> int:
        """Period: 2 for an even number of workers, n for an odd number, 1 for two workers."""
        return super().period(size) * (1 if size <= 2 else size if size % 2 else 2)

    def sources(self, rank: int, size: int, step: int) -> tuple[int, ...]:
        # Shifted by one worker per step: pairs alternate, and with an odd number each worker is alone in turn.
        place = (rank - step) % size
        alone = place == size - 1 and size % 2 == 1
        return () if alone else ((rank + (-1 if place % 2 else 1)) % size,)


@dataclass(frozen=True)
class OnePeerExponential(Topology):
    """Worker i receives from i - 2^(t mod ceil(log2 n)), weights 1/2; directed.

    Exact consensus in log2 n steps where n is a power of two. Source: Assran et al. 1811.10792; Ying et al. 2110.13363.
    """

    def period(self, size: int) -> int:
        return super().period(size) * max(1, ceil_log2(size))

    def sources(self, rank: int, size: int, step: int) -> tuple[int, ...]:
        return others(rank, ((rank - (1 << step % self.period(size))) % size,))


@dataclass(frozen=True)
class Hypercube(Topology):
    """Pairs (i, i XOR 2^(t mod log2 n)), weights 1/2: exact consensus in log2 n steps, n a power of two."""

    def period(self, size: int) -> int:
        """Period: log2 n. ValueError: n isn't a power of two."""
        if size & (size - 1):
            raise ValueError(
                f"Hypercube needs a power of two workers, got {size}: use BaseGraph() or OnePeerExponential()"
            )
        return super().period(size) * max(1, ceil_log2(size))

    def sources(self, rank: int, size: int, step: int) -> tuple[int, ...]:
        return (rank ^ (1 << step % self.period(size)),) if size > 1 else ()


@checked
@dataclass(frozen=True)
class BaseGraph(Topology):
    """Base-(k+1) graph, k = max_degree: exact consensus for every n, at most k peers per step, weights of its own.

    Consensus takes at most 2 log_{k+1} n + 2 steps. Source: Takezawa et al. 2305.11420."""

    max_degree: int = 1

    def __post_init__(self) -> None:
        at_least_one("BaseGraph's max_degree", self.max_degree, "1 receives from one peer per step")

    def period(self, size: int) -> int:
        return super().period(size) * len(base_graph(size, self.max_degree))

    def sources(self, rank: int, size: int, step: int) -> tuple[int, ...]:
        return others(rank, self.row(rank, size, step))

    def row(self, rank: int, size: int, step: int) -> dict[int, float]:
        return dict(base_graph(size, self.max_degree)[step % self.period(size)][rank])


@checked
@dataclass(frozen=True)
class RandomMatching(Topology):
    """Random pairs in each step, weights 1/2; with an odd number of workers one is alone.

    Args:
        seed: seed of the random pairs, equal on all workers.
        rounds: number of different matchings before they repeat, so that stability and consensus are computable.
    """

    seed: int = 0
    rounds: int = 64

    def __post_init__(self) -> None:
        at_least_one("RandomMatching's rounds", self.rounds, "64 serves thousands of workers")

    def period(self, size: int) -> int:
        # Two workers have one matching only.
        return super().period(size) * (self.rounds if size > 2 else 1)

    def sources(self, rank: int, size: int, step: int) -> tuple[int, ...]:
        return others(rank, (matching(self.seed, size, step % self.period(size))[rank],))


@lru_cache(maxsize=256)
def matching(seed: int, size: int, step: int) -> tuple[int, ...]:
    """Draw a random matching: [rank] -> its partner, or itself if alone."""
    ranks = list(range(size))
    # The standard library's generator gives one sequence on every platform.
    Random(f"{seed} {size} {step}").shuffle(ranks)
    partner = {ranks[-1]: ranks[-1]}
    for i, j in zip(ranks[::2], ranks[1::2], strict=False):
        partner.update({i: j, j: i})
    return tuple(partner[rank] for rank in range(size))


# ---- base-(k+1) graphs: algorithms 1 (hyper-hypercube), 2 (simple) and 3 (full) of Takezawa et al. 2305.11420 --------
#
# A step is written as its pairs and their weights, {(i, j): w} with i < j; the rest of each row is the worker's own. So
# every step is symmetric, and doubly stochastic by construction. Workers are always listed in ascending order.

Pairs = dict[tuple[int, int], float]
Rows = tuple[dict[int, float], ...]


@lru_cache(maxsize=64)
def base_graph(size: int, max_degree: int) -> tuple[Rows, ...]:
    """Rows of a base-(k+1) graph, [step][rank] -> {j: w_ij} with the rank itself; at most 2 log_{k+1} n + 2 steps.

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
    found = []
    for step in steps:
        rows: list[dict[int, float]] = [{} for _ in range(size)]
        for (i, j), weight in step.items():
            rows[i][j] = rows[j][i] = weight
        found.append(tuple(completed(rank, row) for rank, row in enumerate(rows)))
    return tuple(found)


def _side_by_side(plans: Iterable[list[Pairs]]) -> list[Pairs]:
    """Join plans of equal length over disjoint workers, step by step."""
    return [_union(steps) for steps in zip(*plans, strict=True)]


def _union(steps: Iterable[Pairs]) -> Pairs:
    return dict(chain.from_iterable(step.items() for step in steps))


def _factors(number: int, largest: int) -> list[int]:
    """Factor a number greedily by 2..largest; the factors' product is its largest divisor without greater primes."""
    found = []
    for factor in range(largest, 1, -1):
        while number % factor == 0:
            found.append(factor)
            number //= factor
    return found


def _hyper_hypercube(workers: Sequence[int], max_degree: int) -> list[Pairs]:
    """Number the workers in mixed radix; step d averages workers that differ in digit d only (algorithm 1). The number
    of workers has no prime factor above max_degree + 1."""
    steps, stride = [], 1
    for factor in _factors(len(workers), max_degree + 1):
        cliques: dict[tuple[int, int], list[int]] = {}
        for index, worker in enumerate(workers):
            cliques.setdefault((index // (stride * factor), index % stride), []).append(worker)
        steps.append({pair: 1 / factor for clique in cliques.values() for pair in combinations(clique, 2)})
        stride *= factor
    return steps


def _simple(workers: Sequence[int], max_degree: int) -> list[Pairs]:
    """Simple base graph (algorithm 2): n = a_1 b^p_1 + ... + a_L b^p_L in base b = k + 1, a block of workers per term.

    First every block averages inside. Then block l = 1, 2, ... gives its share to all later blocks, each of whose
    workers is paired with one worker of each of the a_l pieces of block l. Then the mean of every piece is the mean of
    all workers, and every piece averages inside."""
    if prod(_factors(len(workers), max_degree + 1)) == len(workers):
        return _hyper_hypercube(workers, max_degree)
    blocks = _blocks(workers, max_degree + 1)
    means = [_hyper_hypercube([*chain(*pieces)], max_degree) for pieces in blocks]
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
    """Split workers into a block for each nonzero digit of their number, highest first: [block][piece] -> base ** p."""
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


def _spread(blocks: Sequence[Sequence[Sequence[int]]]) -> Pairs:
    """Weights of the step in which the first block gives its share, |V_1| / sum_j |V_j|, to later blocks. Each worker
    of later blocks is paired with one worker of every piece of the first block, with equal weights."""
    pieces, later = blocks[0], [worker for block in blocks[1:] for piece in block for worker in piece]
    own = sum(map(len, pieces))
    weight = own / (own + len(later)) / len(pieces)
    return {(piece[i], worker): weight for piece in pieces for i, worker in enumerate(later)}


def _cycled(steps: Sequence[Pairs], step: int) -> Pairs:
    # A block that already has its mean keeps mixing: its mean doesn't change, and its workers stay closer in training.
    return steps[step % len(steps)] if steps else {}
