"""What a step of a plan asks of the network: who waits for whom, and what each worker's exchange moves.

A step whose graph is disjoint cliques of equal weights all-reduces in them, where messages travel as they are; in every
other one peers send each other messages.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from lightning_decentral.gossip.cliques import Partition, partitions
from lightning_decentral.gossip.plan import Topology, step_graph
from lightning_decentral.gossip.weights import Weights


@dataclass(frozen=True)
class Load:
    """What one worker's exchange is.

    Args:
        clique: workers that all-reduce together, the worker included; 0 where peers exchange.
        inside: messages to or from workers of the same node, whichever are more; in a clique 1 if it is in one node.
        between: the same with other nodes.
        flows: workers of the node, or cliques on it, that use its network card at the same time.
        per_node: the most workers of the clique that share a node.
    """

    clique: int = 0
    inside: int = 0
    between: int = 0
    flows: int = 1
    per_node: int = 1


@dataclass(frozen=True)
class Round:
    """One step. sources[i]: i and all whom it hears, filled up with i to equal lengths, [size, most + 1]."""

    sources: npt.NDArray[np.intp]
    loads: tuple[Load, ...]

    @property
    def heard(self) -> npt.NDArray[np.intp]:
        """[size]: messages that each worker mixes; of a clique that all-reduces one, which is that of all."""
        others = (self.sources != np.arange(len(self.sources))[:, None]).sum(axis=1)
        together = [load.clique > 0 for load in self.loads]
        return np.asarray(np.where(together, np.minimum(others, 1), others), dtype=np.intp)

    @property
    def silent(self) -> bool:
        """Whether nobody talks."""
        return bool(self.sources.shape[1] == 1)


@lru_cache(maxsize=64)
def rounds(
    topology: Topology, weights: Weights, size: int, workers_per_node: int, peers_only: bool = False
) -> tuple[Round, ...]:
    """Of a period.

    Args:
        peers_only: no all-reduce where it would do, as with a codec.
    """
    cliques = None if peers_only else partitions(topology, weights, size)
    by_step = cliques or [None] * topology.period(size)
    return tuple(_round(topology, size, step, found, workers_per_node) for step, found in enumerate(by_step))


def _round(topology: Topology, size: int, step: int, cliques: Partition | None, per_node: int) -> Round:
    graph = step_graph(topology, size, step)
    most = graph.degree
    sources = np.array([[rank, *heard, *[rank] * (most - len(heard))] for rank, heard in enumerate(graph.sources)])
    peers = _peers(graph.sources, graph.targets, per_node) if cliques is None else _cliques(cliques, size, per_node)
    return Round(sources, peers)


def _peers(sources: Sequence[tuple[int, ...]], targets: Sequence[tuple[int, ...]], per_node: int) -> tuple[Load, ...]:
    def outside(rank: int, others: Sequence[int]) -> int:
        return sum(other // per_node != rank // per_node for other in others)

    pairs = list(zip(sources, targets, strict=True))
    between = [max(outside(rank, heard), outside(rank, told)) for rank, (heard, told) in enumerate(pairs)]
    inside = [
        max(len(heard) - outside(rank, heard), len(told) - outside(rank, told))
        for rank, (heard, told) in enumerate(pairs)
    ]
    nodes = [between[start : start + per_node] for start in range(0, len(between), per_node)]
    flows = [max(1, sum(map(bool, node))) for node in nodes]
    return tuple(Load(0, inside[r], between[r], flows[r // per_node]) for r in range(len(pairs)))


def _cliques(cliques: Partition, size: int, per_node: int) -> tuple[Load, ...]:
    nodes = {clique: Counter(rank // per_node for rank in clique) for clique in cliques}
    spanning = [node for touched in nodes.values() if len(touched) > 1 for node in touched]
    loads = [Load()] * size
    for clique, touched in nodes.items():
        if len(clique) > 1:
            flows = max([1, *(spanning.count(node) for node in touched)])
            load = Load(len(clique), int(len(touched) == 1), int(len(touched) > 1), flows, max(touched.values()))
            for rank in clique:
                loads[rank] = load
    return tuple(loads)
