"""How much of the parameters passes a node's network card, counted from the plan."""

from collections.abc import Iterator

from lightning_decentral.gossip.cliques import Partition, partitions
from lightning_decentral.gossip.topology import Topology
from lightning_decentral.gossip.weights import Weights, targets


def all_reduce_copies(size: int, workers_per_node: int) -> float:
    """2 (n - 1) / n: what a ring all-reduce over n workers sends out of each node, in units of the parameters' bytes;
    0 on one node."""
    return 2 * (size - 1) / size if size > workers_per_node else 0.0


def copies_through_card(
    topology: Topology, weights: Weights, size: int, workers_per_node: int, *, peers_only: bool = False
) -> list[float]:
    """For each step of a period: the most that any node sends out through its card, in units of the parameters' bytes.

    A message to a worker of another node counts 1; a ring all-reduce over c workers 2 (c - 1) / c for each of its
    links that leaves the node. What a node receives is as much wherever all are heard by as many as they hear.

    Args:
        peers_only: no all-reduce where it would do, as with a codec.
    """
    by_node = copies_by_node(topology, weights, size, workers_per_node, peers_only=peers_only)
    return [max(sent.values(), default=0.0) for sent in by_node]


def mean_copies(
    topology: Topology, weights: Weights, size: int, workers_per_node: int, *, peers_only: bool = False
) -> float:
    """What the busiest node sends out through its card in a step, as a mean over a period."""
    steps = copies_by_node(topology, weights, size, workers_per_node, peers_only=peers_only)
    nodes = {node for sent in steps for node in sent}
    return max((sum(sent.get(node, 0.0) for sent in steps) / len(steps) for node in nodes), default=0.0)


def copies_by_node(
    topology: Topology, weights: Weights, size: int, workers_per_node: int, *, peers_only: bool = False
) -> list[dict[int, float]]:
    """For each step of a period what every node that sends anything sends out, counted as above."""
    period = topology.period(size)
    cliques = None if peers_only else partitions(topology, weights, size)
    steps = [
        _peers(topology, size, step) if alone is None else _rings(alone)
        for step, alone in enumerate(cliques or [None] * period)
    ]
    return [_by_node(links, workers_per_node) for links in steps]


Links = Iterator[tuple[int, int, float]]


def _peers(topology: Topology, size: int, step: int) -> Links:
    return ((rank, target, 1.0) for rank in range(size) for target in targets(topology, rank, size, step))


def _rings(cliques: Partition) -> Links:
    for clique in cliques:
        for rank, successor in zip(clique, (*clique[1:], clique[0]), strict=True):
            yield rank, successor, 2 * (len(clique) - 1) / len(clique)


def _by_node(links: Links, workers_per_node: int) -> dict[int, float]:
    sent: dict[int, float] = {}
    for rank, target, copies in links:
        node = rank // workers_per_node
        if node != target // workers_per_node:
            sent[node] = sent.get(node, 0.0) + copies
    return sent
