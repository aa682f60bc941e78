"""Every topology of the face, constructed, with small sizes it serves: a new class joins all tests by being there."""

import inspect
from dataclasses import MISSING, fields

import networkx as nx

from lightning_decentral.gossip import (
    AlternatingExponentialRing,
    Auto,
    BaseGraph,
    Every,
    FromGraph,
    OnePeerExponential,
    PeriodicAverage,
    RandomMatching,
    Ring,
    Stream,
    Topology,
    Torus,
)
from lightning_decentral.gossip.plan import topology as face

SIZES = range(1, 9)


def directed_circulant(size: int, offsets: list[int]) -> nx.DiGraph:
    """i -> i + offset for every i; networkx's own adds the way back."""
    return nx.DiGraph([(i, (i + offset) % size) for i in range(size) for offset in offsets])


# More than the class without arguments, and classes that need some.
INSTANCES: dict[type[Topology], list[Topology]] = {
    AlternatingExponentialRing: [AlternatingExponentialRing(1), AlternatingExponentialRing(2)],
    Auto: [Auto(), Auto(workers_per_node=2)],
    BaseGraph: [BaseGraph(), BaseGraph(max_degree=2)],
    Torus: [Torus(), Torus(rows=2)],
    RandomMatching: [RandomMatching(), RandomMatching(seed=3, rounds=8)],
    Every: [Every(3, OnePeerExponential())],
    Stream: [Stream(4, 2, OnePeerExponential())],
    PeriodicAverage: [PeriodicAverage(3, Ring()), PeriodicAverage(4, OnePeerExponential())],
    FromGraph: [
        FromGraph(nx.path_graph(4)),
        FromGraph(edges=[[0, 1], [1, 2], [2, 0], [2, 3], [3, 4]]),
        FromGraph(directed_circulant(6, [1, 2])),
    ],
}


def classes() -> list[type[Topology]]:
    """Concrete topologies that the face exports, in alphabetical order."""
    members = [getattr(face, name) for name in face.__all__]
    return [member for member in members if issubclass(member, Topology) and not inspect.isabstract(member)]


def instances() -> list[Topology]:
    return [topology for cls in classes() for topology in _instances(cls)]


def _instances(cls: type[Topology]) -> list[Topology]:
    needed = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
    assert cls in INSTANCES or not needed, f"{cls.__name__} needs {needed}: add an instance to INSTANCES"
    return INSTANCES.get(cls) or [cls()]


def serves(topology: Topology, size: int) -> bool:
    try:
        topology.period(size)
    except ValueError:
        return False
    return True


def every_topology(sizes: range = SIZES, most_fragments: int | None = None) -> list[tuple[Topology, int]]:
    """(topology, size) pairs; with `most_fragments=1` of those that send a message whole."""
    found = [t for t in instances() if most_fragments is None or len(t.fragments) <= most_fragments]
    return [(topology, size) for topology in found for size in sizes if serves(topology, size)]
