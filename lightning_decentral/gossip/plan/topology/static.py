"""Topologies that don't change over steps: complete, ring, torus, star, tree, exponential, any networkx graph."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import networkx as nx

from lightning_decentral.gossip.plan.topology.topology import Topology, at_least_one, ceil_log2, grid, others
from lightning_decentral.shared.plan.arguments import at_least, checked


@checked
@dataclass(frozen=True, init=False)
class FromGraph(Topology):
    """Topology of any networkx graph; a directed edge u -> v means that v receives from u. Edge weights are ignored.

    Args:
        graph: graph whose nodes are the workers, numbered in sorted order; self-loops and parallel edges are ignored.
        edges: undirected edges between ranks instead of `graph`: [[0, 1], [1, 2]].

    Raises:
        ValueError: both or neither of `graph` and `edges`, or nodes that can't be sorted.
    """

    nodes: int
    edges: tuple[tuple[int, int], ...] = field(repr=False)

    def __init__(self, graph: nx.Graph | None = None, *, edges: Iterable[Sequence[int]] = ()) -> None:
        pairs = [(int(u), int(v)) for u, v in edges]
        if (graph is None) == (not pairs):
            given = "neither" if graph is None else "both"
            raise ValueError(
                f"FromGraph needs a networkx graph or edges=[[0, 1], [1, 2], ...], got {given}: give one of the two"
            )
        if graph is None:
            graph = nx.empty_graph(1 + max(map(max, pairs)))
            graph.add_edges_from(pairs)
        try:
            rank = {node: rank for rank, node in enumerate(sorted(graph.nodes))}
        except TypeError as error:
            raise ValueError(
                f"FromGraph numbers the nodes in sorted order, but {error}: use "
                "networkx.convert_node_labels_to_integers"
            ) from None
        # No loops; an undirected edge in both directions.
        directed = {(rank[u], rank[v]) for u, v in graph.to_directed().edges() if u != v}
        # The dataclass is frozen, and is hashed by its edges instead of the graph.
        object.__setattr__(self, "nodes", len(rank))
        object.__setattr__(self, "edges", tuple(sorted(directed)))

    def period(self, size: int) -> int:
        """Period: 1. ValueError: the graph doesn't have `size` nodes."""
        if size != self.nodes:
            raise ValueError(f"FromGraph has {self.nodes} nodes, got {size} workers: give a graph with {size} nodes")
        return super().period(size)

    def sources(self, rank: int, size: int, step: int) -> tuple[int, ...]:
        return tuple(u for u, v in self.edges if v == rank)

    def label(self, size: int) -> str:
        return f"FromGraph with {len(self.edges)} directed edges"


@checked
@dataclass(frozen=True)
class Tree(Topology):
    """Tree where workers i and (i - 1) // children are linked both ways: binary by default, a chain with children=1.

    Meant for `RelaySum`, which is exact on trees; plain gossip mixes slowly on trees. Source: Vogels et al. 2110.04175.
    """

    children: int = 2

    def __post_init__(self) -> None:
        at_least_one("Tree's children", self.children, "1 is a chain, 2 a binary tree")

    def sources(self, rank: int, size: int, step: int) -> tuple[int, ...]:
        first = rank * self.children + 1
        parent = (rank - 1) // self.children if rank else rank
        return others(rank, (parent, *range(first, min(first + self.children, size))))


@dataclass(frozen=True)
class Complete(Topology):
    """W = 1 1^T / n: all workers receive from all, and have the exact mean in every step."""

    def sources(self, rank: int, size: int, step: int) -> tuple[int, ...]:
        return others(rank, range(size))


@dataclass(frozen=True)
class Ring(Topology):
    """Worker i receives from i - 1 and i + 1, weights 1/3; second eigenvalue 1/3 + 2/3 cos(2 pi / n)."""

    def sources(self, rank: int, size: int, step: int) -> tuple[int, ...]:
        return others(rank, ((rank - 1) % size, (rank + 1) % size))


@checked
@dataclass(frozen=True)
class Torus(Topology):
    """A grid of rows x columns, numbered row by row, closed in both directions; each worker has up to four sources.

    By default the grid is as square as possible: 12 workers are 3 x 4; a prime number of workers is a ring."""

    rows: int | None = None
    columns: int | None = None

    def __post_init__(self) -> None:
        at_least(1, "leave out rows and columns for a grid as square as possible", rows=self.rows, columns=self.columns)

    def period(self, size: int) -> int:
        """Period: 1. ValueError: the grid doesn't have `size` places."""
        steps = super().period(size)
        rows, columns = grid(size, self.rows, self.columns)
        if min(rows, columns) < 1 or rows * columns != size:
            raise ValueError(
                f"{self!r} doesn't fit {size} workers: leave out rows and columns, or make their product {size}"
            )
        return steps

    def sources(self, rank: int, size: int, step: int) -> tuple[int, ...]:
        rows, columns = grid(size, self.rows, self.columns)
        row, column = divmod(rank, columns)
        vertical = [(row + d) % rows * columns + column for d in (-1, 1)]
        return others(rank, vertical + [row * columns + (column + d) % columns for d in (-1, 1)])

    def label(self, size: int) -> str:
        rows, columns = grid(size, self.rows, self.columns)
        return f"Torus {rows} x {columns}" + (" (a ring)" if min(rows, columns) == 1 < size else "")


@dataclass(frozen=True)
class Star(Topology):
    """Star: worker 0 and every other worker are linked both ways, weights 1/n."""

    def sources(self, rank: int, size: int, step: int) -> tuple[int, ...]:
        return others(rank, (0,) if rank else range(size))


@dataclass(frozen=True)
class Exponential(Topology):
    """Worker i receives from i - 2^k for all 2^k < n, weights 1 / (1 + ceil(log2 n)); directed.

    rho = 1 - 2 / (1 + ceil(log2 n)) for even n. Source: Ying et al. 2110.13363."""

    def sources(self, rank: int, size: int, step: int) -> tuple[int, ...]:
        return others(rank, ((rank - (1 << k)) % size for k in range(ceil_log2(size))))
