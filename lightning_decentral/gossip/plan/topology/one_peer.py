"""Who hears whom at which step.

A topology is a frozen value that knows no number of workers: size, rank and step are arguments. To add one, write a
class with `sources`, and `period` where it changes over the steps: weights, checks, simulation, wire and tests read it.
"""

from dataclasses import dataclass

from lightning_decentral.gossip.plan.topology.base_graph import base_graph
from lightning_decentral.gossip.plan.topology.topology import Topology, at_least_one, ceil_log2, matching, others


@dataclass(frozen=True)
class OnePeerRing(Topology):
    """A ring whose workers turn to one side, then to the other: pairs (i, i + 1) with i - step even, weights 1/2.

    An odd number of workers leaves one alone in each step, in turn. Exact consensus for 2 and 4 workers only.
    """

    def period(self, size: int) -> int:
        """2 for an even number of workers, n for an odd one, 1 for two."""
        return super().period(size) * (1 if size <= 2 else size if size % 2 else 2)

    def sources(self, rank: int, size: int, step: int) -> tuple[int, ...]:
        """The other one of the pair."""
        place = (rank - step) % size
        alone = place == size - 1 and size % 2 == 1
        return () if alone else ((rank + (-1 if place % 2 else 1)) % size,)


@dataclass(frozen=True)
class OnePeerExponential(Topology):
    """Worker i hears i - 2^(t mod ceil(log2 n)), weights 1/2; directed.

    Exact consensus in log2 n steps where n is a power of two. Source: Assran et al. 1811.10792; Ying et al. 2110.13363.
    """

    def period(self, size: int) -> int:
        """ceil(log2 n)."""
        return super().period(size) * max(1, ceil_log2(size))

    def sources(self, rank: int, size: int, step: int) -> tuple[int, ...]:
        """One worker."""
        return others(rank, ((rank - (1 << step % self.period(size))) % size,))


@dataclass(frozen=True)
class Hypercube(Topology):
    """Pairs (i, i XOR 2^(t mod log2 n)), weights 1/2: exact consensus in log2 n steps, n a power of two."""

    def period(self, size: int) -> int:
        """log2 n; ValueError where n isn't a power of two."""
        if size & (size - 1):
            raise ValueError(
                f"Hypercube needs a power of two workers, got {size}: use BaseGraph() or OnePeerExponential()"
            )
        return super().period(size) * max(1, ceil_log2(size))

    def sources(self, rank: int, size: int, step: int) -> tuple[int, ...]:
        """The other one of the pair."""
        return (rank ^ (1 << step % self.period(size)),) if size > 1 else ()


@dataclass(frozen=True)
class BaseGraph(Topology):
    """Base-(k+1) graph, k = max_degree: exact consensus for every n, at most k peers per step, own weights.

    At most 2 log_{k+1} n + 2 steps. Source: Takezawa et al. 2305.11420.
    """

    max_degree: int = 1

    def __post_init__(self) -> None:
        at_least_one("BaseGraph's max_degree", self.max_degree, "1 hears one peer per step")

    def period(self, size: int) -> int:
        """The number of steps to exact consensus."""
        return super().period(size) * len(base_graph(size, self.max_degree))

    def sources(self, rank: int, size: int, step: int) -> tuple[int, ...]:
        """Those in the row."""
        return others(rank, self.row(rank, size, step))

    def row(self, rank: int, size: int, step: int) -> dict[int, float]:
        """The construction's weights, symmetric."""
        return dict(base_graph(size, self.max_degree)[step % self.period(size)][rank])


@dataclass(frozen=True)
class RandomMatching(Topology):
    """Random pairs, weights 1/2; an odd number of workers leaves one alone.

    Args:
        seed: equal on all workers, as everything in a topology.
        rounds: different matchings before they repeat; a finite period keeps stability and consensus computable.
    """

    seed: int = 0
    rounds: int = 64

    def __post_init__(self) -> None:
        at_least_one("RandomMatching's rounds", self.rounds, "64 serves thousands of workers")

    def period(self, size: int) -> int:
        """`rounds`."""
        return super().period(size) * (self.rounds if size > 2 else 1)

    def sources(self, rank: int, size: int, step: int) -> tuple[int, ...]:
        """The other one of the pair."""
        return others(rank, (matching(self.seed, size, step % self.period(size))[rank],))
