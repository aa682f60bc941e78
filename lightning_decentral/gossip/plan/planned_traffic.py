"""Planned traffic: copies of the parameters that each worker and each node's network card sends; cliques.

`wire.peer`, `wire.coded_clique` and `wire.assembly` count the bytes that are really sent, as `wire.exchange.Traffic`.

In a step whose graph is disjoint cliques of equal weights the workers of a clique all-reduce, if messages aren't
encoded, or if the rule allows owners of parts to add up codes. In every other step peers send each other messages."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from itertools import permutations
from math import log2

import numpy as np
import numpy.typing as npt

from lightning_decentral.gossip.plan.topology.topology import StepGraph, Topology, step_graph
from lightning_decentral.gossip.plan.weights import Weights


class Cliques(Enum):
    """Ways to exchange messages in a clique: a group of workers in which each receives from all with equal weights."""

    PEERS = "each sends to each, as with codes that no owner of a part adds up"
    RING = "a ring all-reduces unencoded messages"
    OWNERS = "owners of parts add up codes"


@dataclass(frozen=True)
class RoundLoad:
    """Load of one worker's exchange: its messages, and how many workers share a network card."""

    clique: int = 0  # workers that all-reduce together, the worker included; 0 if peers exchange messages
    inside: int = 0  # messages to or from workers of the same node, whichever are more; in a clique 1 if in one node
    between: int = 0  # messages to or from workers of other nodes, whichever are more; in a clique 1 if over nodes
    flows: int = 1  # workers of the node, or cliques on it, that use its network card at the same time
    per_node: int = 1  # the most workers of the clique that share a node


@dataclass(frozen=True)
class Round:
    """Messages of one step. sources[i]: i and its sources, filled up with i to equal lengths, [size, most + 1]."""

    sources: npt.NDArray[np.intp]
    loads: tuple[RoundLoad, ...]
    more: int = 0  # messages of a worker from sources left out of `sources`, if a part of all workers is simulated

    @property
    def received(self) -> npt.NDArray[np.intp]:
        """Number of messages that each worker mixes, [size]; 1 in a clique that all-reduces."""
        others = (self.sources != np.arange(len(self.sources))[:, None]).sum(axis=1) + self.more
        together = [load.clique > 0 for load in self.loads]
        return np.asarray(np.where(together, np.minimum(others, 1), others), dtype=np.intp)

    @property
    def silent(self) -> bool:
        return bool(self.sources.shape[1] == 1)


@lru_cache(maxsize=64)
def rounds(
    topology: Topology, weights: Weights, size: int, workers_per_node: int, cliques: Cliques = Cliques.RING
) -> tuple[Round, ...]:
    """Make the rounds of a period, one for each step."""
    found = []
    for step, together in enumerate(_partitions(topology, weights, size, cliques)):
        graph = step_graph(topology, size, step)
        rows = [[rank, *own, *[rank] * (graph.degree - len(own))] for rank, own in enumerate(graph.sources)]
        loads = _peer_loads(graph, workers_per_node) if together is None else _cliques(together, size, workers_per_node)
        found.append(Round(np.array(rows), loads))
    return tuple(found)


@lru_cache(maxsize=64)
def rounds_of_part(
    topology: Topology, weights: Weights, part: int, whole: int, workers_per_node: int, cliques: Cliques
) -> tuple[Round, ...]:
    """Make the rounds of `part` of the `whole` workers, with as many messages as all workers would send. A clique of
    the whole part is scaled to all workers. The number of peers grows by one for each doubling of the workers, if it
    does from half of the part to the part (an exponential graph), or peers are all workers."""
    # Half of the nodes, or of the only node's workers.
    half = part // 2 if part <= workers_per_node else max(1, part // workers_per_node // 2) * workers_per_node
    found, fewer = (rounds(topology, weights, size, workers_per_node, cliques) for size in (part, half))
    doubling = _most_peers(found) == _most_peers(fewer) + 1

    def grown(one: Round) -> Round:
        peers = _most_peers([one])
        more = whole - part if peers > part / 2 else round(doubling * log2(whole / part))
        more = 0 if not peers or any(load.clique for load in one.loads) else more
        loads = {
            load: replace(load, clique=whole if load.clique == part else load.clique, between=load.between + more)
            for load in {*one.loads}
        }
        return replace(one, loads=tuple(loads[load] for load in one.loads), more=more)

    return tuple(map(grown, found))


def _most_peers(rounds: Iterable[Round]) -> int:
    return max(load.inside + load.between for one in rounds for load in {*one.loads})


Partition = tuple[tuple[int, ...], ...]


def _peer_loads(graph: StepGraph, per_node: int) -> tuple[RoundLoad, ...]:
    def outside(rank: int, others: Sequence[int]) -> int:
        return sum(other // per_node != rank // per_node for other in others)

    pairs = list(enumerate(zip(graph.sources, graph.targets, strict=True)))
    # Both directions run at the same time: the direction with more messages counts.
    between = [max(outside(rank, ranks) for ranks in both) for rank, both in pairs]
    inside = [max(len(ranks) - outside(rank, ranks) for ranks in both) for rank, both in pairs]
    nodes = [between[start : start + per_node] for start in range(0, len(between), per_node)]
    flows = [max(1, sum(map(bool, node))) for node in nodes]
    return tuple(RoundLoad(0, inside[r], between[r], flows[r // per_node]) for r in range(len(pairs)))


def _cliques(cliques: Partition, size: int, per_node: int) -> tuple[RoundLoad, ...]:
    nodes = {clique: Counter(rank // per_node for rank in clique) for clique in cliques}
    spanning = [node for touched in nodes.values() if len(touched) > 1 for node in touched]
    loads = [RoundLoad()] * size
    for clique, touched in nodes.items():
        if len(clique) > 1:
            flows = max([1, *(spanning.count(node) for node in touched)])
            load = RoundLoad(len(clique), int(len(touched) == 1), int(len(touched) > 1), flows, max(touched.values()))
            for rank in clique:
                loads[rank] = load
    return tuple(loads)


def all_reduce_copies(size: int, workers_per_node: int) -> float:
    """2 (n - 1) / n: copies of the parameters that a ring all-reduce over n workers sends out of each node; 0 on one
    node."""
    return 2 * (size - 1) / size if size > workers_per_node else 0.0


def copies_through_card(
    topology: Topology, weights: Weights, size: int, workers_per_node: int, cliques: Cliques = Cliques.RING
) -> list[float]:
    """Copies of the parameters that the busiest node sends through its network card, for each step of a period.

    A message to a worker of another node counts 1; a ring all-reduce over c workers counts 2 (c - 1) / c for each of
    its links that leaves the node; where owners of parts add up codes, each pair of workers on two nodes counts 2 / c.
    A node receives as many copies as it sends if in-degrees equal out-degrees."""
    by_node = copies_by_node(topology, weights, size, workers_per_node, cliques)
    return [max(sent.values(), default=0.0) for sent in by_node]


def copies_sent(topology: Topology, weights: Weights, rank: int, size: int, cliques: Cliques = Cliques.RING) -> float:
    """Copies of its message that one worker sends per step, the mean over a period: 1 for each target, 2 (c - 1) / c
    for an all-reduce over c workers."""
    steps, sent = _partitions(topology, weights, size, cliques), 0.0
    for step, partition in enumerate(steps):
        if partition is None:
            sent += len(step_graph(topology, size, step).targets[rank])
        else:
            clique = next(c for c in partition if rank in c)
            sent += 2 * (len(clique) - 1) / len(clique)
    return sent / len(steps)


def mean_copies(
    topology: Topology, weights: Weights, size: int, workers_per_node: int, cliques: Cliques = Cliques.RING
) -> float:
    """Copies of the parameters that the busiest node sends through its network card per step, mean over a period."""
    steps = copies_by_node(topology, weights, size, workers_per_node, cliques)
    nodes = {node for sent in steps for node in sent}
    return max((sum(sent.get(node, 0.0) for sent in steps) / len(steps) for node in nodes), default=0.0)


def copies_by_node(
    topology: Topology, weights: Weights, size: int, workers_per_node: int, cliques: Cliques = Cliques.RING
) -> list[dict[int, float]]:
    """{node: copies that it sends out} for each step of a period, without silent nodes: see `copies_through_card`."""
    steps = []
    for step, together in enumerate(_partitions(topology, weights, size, cliques)):
        if together is None:  # peers
            graph = step_graph(topology, size, step)
            links = [(rank, j, 1.0) for rank in range(size) for j in graph.targets[rank]]
        elif cliques is Cliques.OWNERS:  # each to each
            links = [(*pair, 2 / len(c)) for c in together for pair in permutations(c, 2)]
        else:  # in a ring
            rings = [(c, zip(c, (*c[1:], c[0]), strict=True)) for c in together]
            links = [(*pair, 2 * (len(c) - 1) / len(c)) for c, pairs in rings for pair in pairs]
        sent: dict[int, float] = {}
        for rank, target, copies in links:
            node = rank // workers_per_node
            if node != target // workers_per_node:
                sent[node] = sent.get(node, 0.0) + copies
        steps.append(sent)
    return steps


def _partitions(topology: Topology, weights: Weights, size: int, cliques: Cliques) -> Sequence[Partition | None]:
    """Cliques that all-reduce in each step of a period; None for a step in which peers exchange messages."""
    found = None if cliques is Cliques.PEERS else partitions(topology, weights, size)
    return found or [None] * topology.period(size)


def partition(topology: Topology, weights: Weights, size: int, step: int) -> Partition | None:
    """Cliques of one step, each sorted, a silent worker alone; None if the step isn't a mean over cliques."""
    rows = [weights.row(topology, rank, size, step) for rank in range(size)]
    cliques = tuple(dict.fromkeys(tuple(sorted(row)) for row in rows))
    # A mean over cliques: the sets of a worker and its sources are disjoint.
    if sum(map(len, cliques)) != size:
        return None
    equal = all(abs(w - 1 / len(row)) < 1e-12 for row in rows for w in row.values())
    return cliques if equal else None


def partitions(topology: Topology, weights: Weights, size: int) -> tuple[Partition | None, ...] | None:
    """Cliques that all-reduce in each step of a period, None for a step of peers; None if all-reducing never pays."""
    steps = [partition(topology, weights, size, step) for step in range(topology.period(size))]
    # Two workers exchange the same bytes as peers.
    pays = [cliques is not None and any(len(c) > 2 for c in cliques) for cliques in steps]
    if not any(pays):
        return None
    # Then steps of pairs all-reduce, too, and no peers are needed.
    if all(steps):
        return tuple(steps)
    return tuple(cliques if worth else None for cliques, worth in zip(steps, pays, strict=True))
