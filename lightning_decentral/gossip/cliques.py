"""Steps whose graph falls into disjoint cliques of equal weights: there, mixing is a mean over the clique."""

from lightning_decentral.gossip.topology import Topology
from lightning_decentral.gossip.weights import Weights

Partition = tuple[tuple[int, ...], ...]


def partition(topology: Topology, weights: Weights, size: int, step: int) -> Partition | None:
    """The cliques of one step, each sorted, a silent worker alone; None where the step isn't a mean over cliques."""
    rows = [weights.row(topology, rank, size, step) for rank in range(size)]
    members = [tuple(sorted(row)) for row in rows]
    equal = all(abs(w - 1 / len(row)) < 1e-12 for row in rows for w in row.values())
    closed = all(members[j] == members[i] for i in range(size) for j in members[i])
    return tuple(dict.fromkeys(members)) if equal and closed else None


def partitions(topology: Topology, weights: Weights, size: int) -> tuple[Partition, ...] | None:
    """The partitions of all steps of a period where all-reduce pays: every step is a mean over cliques and some clique
    has more than two workers (two exchange the same bytes as peers). None elsewhere."""
    steps = []
    for step in range(topology.period(size)):
        cliques = partition(topology, weights, size, step)
        if cliques is None:
            return None
        steps.append(cliques)
    return tuple(steps) if any(len(c) > 2 for cliques in steps for c in cliques) else None
