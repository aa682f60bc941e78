"""Topology: the sources of a worker at each step (`period`, `sources`); one step of it as a graph.

A topology is a frozen value that knows no number of workers: size, rank and step are arguments. To add one, write a
class with `sources`, and `period` where it changes over the steps (`Ring` in `static` is the one to copy), a line in
this folder's `__init__` and in `gossip/__init__`, and `conf/strategy/topology/NAME.yaml`: weights, checks, simulation,
wire and tests read it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import fsum, isqrt
from random import Random


@dataclass(frozen=True, eq=False)  # of a user's class without fields no two are equal, for what caches plans
class Topology(ABC):
    """sources(rank, size, step): whom `rank` receives from at `step`; the plan repeats after `period(size)` steps."""

    def period(self, size: int) -> int:
        """Steps after which the plan repeats, at least 1. ValueError: the topology can't serve `size` workers."""
        at_least_one("the number of workers", size, "set trainer.devices to at least 1")
        return 1

    @abstractmethod
    def sources(self, rank: int, size: int, step: int) -> tuple[int, ...]:
        """Ranks that `rank` receives from at `step`: sorted, without itself; empty: silent. Any step >= 0."""

    def row(self, rank: int, size: int, step: int) -> dict[int, float]:
        """{j: w_ij} for i = rank, itself included; sums to one.

        w_ij = 1 / (1 + max(d_i, d_j)) where the step's graph is symmetric (Metropolis-Hastings), 1 / (1 + max_i d_i)
        where it is directed; the rest stays with i. Columns sum to one where in-degrees equal out-degrees.
        """
        graph = step_graph(self, size, step)
        return graph.metropolis_hastings(rank) if graph.symmetric else graph.max_degree(rank)

    @property
    def fragments(self) -> "tuple[Topology, ...]":
        """Topologies by which each fragment of the model is sent; one where all of it is one message."""
        return (self,)

    def placed(self, workers_per_node: int) -> "Topology":
        """The same plan, given how many workers share a node and its network card, where it asks."""
        return self

    def label(self, size: int) -> str:
        """Name in the start-up summary."""
        return repr(self).removesuffix("()")


@dataclass(frozen=True)
class StepGraph:
    """One step's graph: sources[i] are those that i receives from, sorted. Degrees d_i count them."""

    sources: tuple[tuple[int, ...], ...]

    @cached_property
    def targets(self) -> tuple[tuple[int, ...], ...]:
        """targets[j]: those that receive from j, sorted."""
        heard_by: list[list[int]] = [[] for _ in self.sources]
        for rank, sources in enumerate(self.sources):
            for source in sources:
                heard_by[source].append(rank)
        return tuple(map(tuple, heard_by))

    @cached_property
    def symmetric(self) -> bool:
        """True where every worker's sources are its targets, too: the graph is undirected."""
        return self.sources == self.targets

    @cached_property
    def degree(self) -> int:
        return max(map(len, self.sources))

    def metropolis_hastings(self, rank: int) -> dict[int, float]:
        """w_ij = 1 / (1 + max(d_i, d_j)): symmetric and doubly stochastic on every symmetric graph."""
        sources = self.sources[rank]
        return completed(rank, {j: 1 / (1 + max(len(sources), len(self.sources[j]))) for j in sources})

    def max_degree(self, rank: int) -> dict[int, float]:
        """w_ij = 1 / (1 + max_i d_i): doubly stochastic where every in-degree equals the out-degree."""
        return completed(rank, dict.fromkeys(self.sources[rank], 1 / (1 + self.degree)))


def step_graph(topology: Topology, size: int, step: int) -> StepGraph:
    """The graph of a step; steps that differ by a period share it."""
    return _step_graph(topology, size, step % topology.period(size))


@lru_cache(maxsize=512)
def _step_graph(topology: Topology, size: int, phase: int) -> StepGraph:
    return StepGraph(tuple(topology.sources(rank, size, phase) for rank in range(size)))


def completed(rank: int, heard: dict[int, float]) -> dict[int, float]:
    """The row with these weights for others, and the rest of 1 for the worker itself."""
    return {**heard, rank: 1 - fsum(heard.values())}


def audiences(topology: Topology, rank: int, size: int) -> dict[int, int]:
    """{target: number of its audience}: the targets of one audience receive from `rank` in exactly the same steps."""
    heard: dict[int, list[int]] = {}
    for step in range(topology.period(size)):
        for target in step_graph(topology, size, step).targets[rank]:
            heard.setdefault(target, []).append(step)
    numbers: dict[tuple[int, ...], int] = {}
    return {target: numbers.setdefault(tuple(heard[target]), len(numbers)) for target in sorted(heard)}


def at_least_one(what: str, value: int, remedy: str) -> None:
    """ValueError unless value >= 1."""
    if value < 1:
        raise ValueError(f"{what} must be at least 1, got {value}: {remedy}")


def others(rank: int, heard: Iterable[int]) -> tuple[int, ...]:
    """Ranks sorted, each once, without `rank`."""
    return tuple(sorted(set(heard) - {rank}))


def ceil_log2(number: int) -> int:
    """ceil(log2 number), exactly."""
    return (number - 1).bit_length()


def grid(size: int, rows: int | None, columns: int | None) -> tuple[int, int]:
    """(rows, columns): what is given is kept, the rest follows from size; nothing given, as square as possible."""
    if rows is None and columns is None:
        rows = next(r for r in range(isqrt(size), 0, -1) if size % r == 0)
    if rows is None:
        rows = size // max(columns or 1, 1)
    return rows, size // max(rows, 1) if columns is None else columns


@lru_cache(maxsize=256)
def matching(seed: int, size: int, step: int) -> tuple[int, ...]:
    """[rank] -> its partner, itself if alone."""
    ranks = list(range(size))
    # The standard library's generator gives one sequence on every platform.
    Random(f"{seed} {size} {step}").shuffle(ranks)
    partner = {ranks[-1]: ranks[-1]}
    for i, j in zip(ranks[::2], ranks[1::2], strict=False):
        partner.update({i: j, j: i})
    return tuple(partner[rank] for rank in range(size))
