"""What topologies are made of: random pairs, grids, networkx graphs."""

from collections.abc import Iterable
from functools import lru_cache
from math import isqrt
from random import Random

import networkx as nx

Edges = tuple[tuple[int, int], ...]


def at_least_one(what: str, value: int, remedy: str) -> None:
    """ValueError unless value >= 1."""
    if value < 1:
        raise ValueError(f"{what} must be at least 1, got {value}: {remedy}")


def others(rank: int, heard: Iterable[int]) -> tuple[int, ...]:
    """Sorted, each once, without `rank`."""
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
    """[rank] -> its partner, itself if alone. The standard library's generator gives one sequence on every platform."""
    ranks = list(range(size))
    Random(f"{seed} {size} {step}").shuffle(ranks)
    partner = {ranks[-1]: ranks[-1]}
    for i, j in zip(ranks[::2], ranks[1::2], strict=False):
        partner.update({i: j, j: i})
    return tuple(partner[rank] for rank in range(size))


def numbered(graph: nx.Graph) -> tuple[int, Edges]:
    """(nodes, directed edges) with the nodes numbered in sorted order; no loops, an undirected edge in both directions.

    Raises:
        ValueError: the nodes can't be sorted.
    """
    try:
        rank = {node: rank for rank, node in enumerate(sorted(graph.nodes))}
    except TypeError as error:
        raise ValueError(
            f"FromGraph numbers the nodes in sorted order, but {error}: use networkx.convert_node_labels_to_integers"
        ) from None
    heard = {(rank[u], rank[v]) for u, v in graph.to_directed().edges() if u != v}
    return len(rank), tuple(sorted(heard))
