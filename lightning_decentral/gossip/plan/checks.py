"""Checks of topology, weights and delay before training: sums of weights, connectivity, symmetry, delay."""

import networkx as nx
import numpy as np

from lightning_decentral.gossip.plan.topology.topology import Topology, step_graph
from lightning_decentral.gossip.plan.weights import Dyadic, Own, Weights, mixing_matrix, most_in_flight, talking_steps


def check_columns(topology: Topology, size: int, weights: Weights, rows_too: bool = False) -> None:
    """Check for push-sum that W's columns sum to one, and that the graph is strongly connected over time.
    ValueError: a column doesn't sum to one, or some workers' parameters never reach some others."""
    for step in range(min(topology.period(size), CHECKED_STEPS)):
        _check_sources(topology, size, step)
        rows = [weights.row(topology, rank, size, step) for rank in range(size)]
        if rows_too:
            _check_rows(topology, rows, step)
        _check_columns(topology, rows, step)
    _check_connected(topology, size)


def check_symmetric(who: str, topology: Topology, size: int, weights: Weights, instead: str) -> None:
    """Raise ValueError unless w_ij = w_ji in every step; `instead` names an alternative for the error."""
    for step in range(min(topology.period(size), CHECKED_STEPS)):
        matrix = mixing_matrix(topology, size, step, weights)
        difference = np.abs(matrix - matrix.T)
        i, j = np.unravel_index(int(difference.argmax()), difference.shape)
        if difference[i, j] > 1e-9:
            raise ValueError(
                f"{who} needs a symmetric mixing matrix, but on {topology.label(size)} worker {i} gives {j} the weight "
                f"{matrix[i, j]:.4g} and {j} gives {i} {matrix[j, i]:.4g}: use a symmetric graph, or {instead}"
            )


def check_one_flight(rule: str, topology: Topology, size: int, delay: int) -> None:
    """Raise ValueError unless every message is mixed before the next is sent."""
    flights = most_in_flight(topology, size, delay)
    if flights > 1:
        raise ValueError(
            f"{rule} must mix each message before the next is sent, but with delay {delay} {flights} are in flight on "
            f"{topology.label(size)}: use delay=1, or topology=Every({delay}, ...)"
        )


def check_equals(rule: str, topology: Topology, size: int, weights: Weights) -> None:
    """Raise ValueError unless in every step with messages all workers receive from all, with equal weights."""
    for step in talking_steps(topology, size):
        for rank in range(size):
            row = weights.row(topology, rank, size, step)
            if len(row) < size or max(row.values()) - min(row.values()) > 1e-9:
                raise ValueError(
                    f"{rule} averages all workers equally, but on {topology.label(size)} worker {rank} receives from "
                    f"{len(row) - 1} of {size - 1}: use topology=Every(8, Complete()) or combine=OuterNesterov()"
                )


def check_tree(rule: str, topology: Topology, size: int, weights: Weights) -> None:
    """Raise ValueError unless all steps with messages have one graph, a tree on all workers, and `Dyadic` weights."""
    graphs = {step_graph(topology, size, step) for step in talking_steps(topology, size)}
    tree = nx.Graph([(i, j) for graph in graphs for i, sources in enumerate(graph.sources) for j in sources])
    symmetric = all(graph.symmetric for graph in graphs)
    if size > 1 and not (len(graphs) == 1 and symmetric and len(tree) == size and nx.is_tree(tree)):
        raise ValueError(
            f"{rule} needs one tree on all {size} workers, {topology.label(size)} isn't one: use topology=Tree(), "
            "Star() or FromGraph(networkx.minimum_spanning_tree(...))"
        )
    for step in talking_steps(topology, size):
        for rank in range(size):
            if weights.row(topology, rank, size, step) != Dyadic().row(topology, rank, size, step):
                raise ValueError(f"{rule} needs weights that are powers of two: use weights=Dyadic()")


CHECKED_STEPS = 16  # Steps whose weights are summed; later steps of a longer period are made in the same way.


def check(topology: Topology, size: int, weights: Weights | None = None) -> None:
    """Check that mixing keeps the mean of the workers, and that every worker's parameters reach every other worker.
    ValueError: the topology can't serve `size`; a row has other workers than the sources, a negative weight, or doesn't
    sum to one; a column doesn't sum to one; some workers' parameters never reach some others."""
    check_columns(topology, size, weights or Own(), rows_too=True)


def _check_sources(topology: Topology, size: int, step: int) -> None:
    for rank in range(size):
        sources = topology.sources(rank, size, step)
        if list(sources) != sorted(set(sources) - {rank}) or not set(sources) <= set(range(size)):
            raise ValueError(
                f"{topology.label(size)}: sources of worker {rank} at step {step} are {sources}: "
                f"return other workers of 0..{size - 1}, sorted, each once"
            )


def _check_rows(topology: Topology, rows: list[dict[int, float]], step: int) -> None:
    graph = step_graph(topology, len(rows), step)
    for rank, row in enumerate(rows):
        where = f"{topology.label(len(rows))}: the weights of worker {rank} at step {step}"
        if row.keys() != {rank, *graph.sources[rank]}:
            raise ValueError(
                f"{where} are for {sorted(row)}: give one for each of {sorted({rank, *graph.sources[rank]})}"
            )
        if min(row.values()) < 0:
            raise ValueError(f"{where} include {min(row.values()):.6g}: weights must not be negative")
        # Not `>=`: this refuses NaN, too.
        if not abs(sum(row.values()) - 1) < 1e-9:
            raise ValueError(
                f"{where} sum to {sum(row.values()):.6g}: they must sum to 1, give the rest to the worker itself "
                "(combine=PushSum() needs no such rows)"
            )


def _check_columns(topology: Topology, rows: list[dict[int, float]], step: int) -> None:
    sums = [0.0] * len(rows)
    for row in rows:
        for rank, weight in row.items():
            sums[rank] += weight
    worst = max(range(len(rows)), key=lambda rank: abs(sums[rank] - 1))
    if abs(sums[worst] - 1) > 1e-9:
        raise ValueError(
            f"{topology.label(len(rows))}: the weights given to worker {worst} at step {step} sum to {sums[worst]:.6g}"
            ", so the mean would drift: use weights=MetropolisHastings() and a symmetric graph, "
            "or combine=PushSum() with weights=OutDegree()"
        )


def _check_connected(topology: Topology, size: int) -> None:
    everyone, links = set(range(size)), nx.DiGraph()  # an edge for each link that is used in a period
    links.add_nodes_from(everyone)
    graphs = {step_graph(topology, size, step) for step in range(topology.period(size))}
    links.add_edges_from((j, i) for graph in graphs for i, sources in enumerate(graph.sources) for j in sources)
    # The graph is strongly connected iff worker 0 reaches all workers, and all workers reach worker 0.
    below, above = {0, *nx.ancestors(links, 0)}, {0, *nx.descendants(links, 0)}
    for receivers, senders in ((below, everyone - below), (everyone - above, above)):
        if receivers and senders:
            raise ValueError(
                f"{topology.label(size)}: workers {_some(receivers)} never receive from {_some(senders)}, directly or "
                "through others: add edges between them, or use Auto()"
            )


def _some(workers: set[int]) -> str:
    shown = ", ".join(map(str, sorted(workers)[:8]))
    return "{" + shown + (", ..." if len(workers) > 8 else "") + "}"
