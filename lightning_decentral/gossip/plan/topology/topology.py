"""Interface of topologies: the sources of a worker at each step (`period`, `sources`), and a step's graph.

A topology is a frozen value that doesn't depend on the number of workers: size, rank and step are arguments. To add
one, write a class with `sources`, and `period` if the graph changes over steps (copy `Ring` in `static`), a line in
this folder's `__init__` and in `gossip/__init__`, and `conf/strategy/topology/NAME.yaml`: weights, checks, simulation,
wire and tests read it."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import fsum, isqrt


@dataclass(frozen=True, eq=False)  # no two instances of a user's class without fields are equal, for caches of plans
class Topology(ABC):
    """Communication graph by step: `rank` receives from sources(rank, size, step); repeats after period(size) steps."""

    def period(self, size: int) -> int:
        """Steps after which the graphs repeat, at least 1. ValueError: the topology can't serve `size` workers."""
        at_least_one("the number of workers", size, "set trainer.devices to at least 1")
        return 1

    @abstractmethod
    def sources(self, rank: int, size: int, step: int) -> tuple[int, ...]:
        """Ranks from which `rank` receives at `step` >= 0: sorted, without itself; empty if it receives nothing."""

    def row(self, rank: int, size: int, step: int) -> dict[int, float]:
        """Mixing weights {j: w_ij} for i = rank, j = i included, which sum to one.

        w_ij = 1 / (1 + max(d_i, d_j)) if the step's graph is symmetric (Metropolis-Hastings), 1 / (1 + max_i d_i)
        if it is directed; i keeps the rest. Columns sum to one if in-degrees equal out-degrees."""
        graph = step_graph(self, size, step)
        return graph.metropolis_hastings(rank) if graph.symmetric else graph.max_degree(rank)

    @property
    def fragments(self) -> "tuple[Topology, ...]":
        """Topologies by which each fragment of the model is sent; one if a message has the whole model."""
        return (self,)

    def placed(self, workers_per_node: int) -> "Topology":
        """Return the topology adapted to the number of workers that share a node and its network card."""
        return self

    def label(self, size: int) -> str:
        """Name in the start-up summary."""
        return repr(self).removesuffix("()")


@dataclass(frozen=True)
class StepGraph:
    """Graph of one step: i receives from sources[i], which are sorted; the degree d_i is their number."""

    sources: tuple[tuple[int, ...], ...]

    @cached_property
    def targets(self) -> tuple[tuple[int, ...], ...]:
        """targets[j]: sorted ranks that receive from j."""
        targets: list[list[int]] = [[] for _ in self.sources]
        for rank, sources in enumerate(self.sources):
            for source in sources:
                targets[source].append(rank)
        return tuple(map(tuple, targets))

    @cached_property
    def symmetric(self) -> bool:
        """Return whether every worker's sources are its targets, too: the graph is undirected."""
        return self.sources == self.targets

    @cached_property
    def degree(self) -> int:
        return max(map(len, self.sources))

    def metropolis_hastings(self, rank: int) -> dict[int, float]:
        """w_ij = 1 / (1 + max(d_i, d_j)): symmetric and doubly stochastic on every symmetric graph."""
        sources = self.sources[rank]
        return completed(rank, {j: 1 / (1 + max(len(sources), len(self.sources[j]))) for j in sources})

    def max_degree(self, rank: int) -> dict[int, float]:
        """w_ij = 1 / (1 + max_i d_i): doubly stochastic if every in-degree equals the out-degree."""
        return completed(rank, dict.fromkeys(self.sources[rank], 1 / (1 + self.degree)))


def step_graph(topology: Topology, size: int, step: int) -> StepGraph:
    """Return the graph of a step, cached by step modulo the period."""
    return _step_graph(topology, size, step % topology.period(size))


@lru_cache(maxsize=512)
def _step_graph(topology: Topology, size: int, phase: int) -> StepGraph:
    return StepGraph(tuple(topology.sources(rank, size, phase) for rank in range(size)))


def completed(rank: int, weights: dict[int, float]) -> dict[int, float]:
    """Complete a row of weights for other workers by the worker's own, so that the row sums to 1."""
    return {**weights, rank: 1 - fsum(weights.values())}


def audiences(topology: Topology, rank: int, size: int) -> dict[int, int]:
    """Group targets as {target: number of its audience}: an audience receives from `rank` in exactly the same steps."""
    steps: dict[int, list[int]] = {}
    for step in range(topology.period(size)):
        for target in step_graph(topology, size, step).targets[rank]:
            steps.setdefault(target, []).append(step)
    numbers: dict[tuple[int, ...], int] = {}
    return {target: numbers.setdefault(tuple(steps[target]), len(numbers)) for target in sorted(steps)}


def at_least_one(what: str, value: int, remedy: str) -> None:
    """Raise ValueError unless value >= 1."""
    if value < 1:
        raise ValueError(f"{what} must be at least 1, got {value}: {remedy}")


def others(rank: int, ranks: Iterable[int]) -> tuple[int, ...]:
    """Sort ranks, each once, without `rank`."""
    return tuple(sorted(set(ranks) - {rank}))


def ceil_log2(number: int) -> int:
    """ceil(log2 number), exactly."""
    return (number - 1).bit_length()


def grid(size: int, rows: int | None, columns: int | None) -> tuple[int, int]:
    """Complete (rows, columns) of a grid from its size; if neither is given, as square as possible."""
    if rows is None and columns is None:
        rows = next(r for r in range(isqrt(size), 0, -1) if size % r == 0)
    if rows is None:
        rows = size // max(columns or 1, 1)
    return rows, size // max(rows, 1) if columns is None else columns
