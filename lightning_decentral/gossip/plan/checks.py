"""Checks of a plan before training: rows and columns of weights, connectivity, symmetry, one message at a time."""

import networkx as nx
import numpy as np

from lightning_decentral.gossip.plan.topology.topology import Topology, step_graph
from lightning_decentral.gossip.plan.weights import Dyadic, Own, Weights, mixing_matrix, most_in_flight, talking_steps


def check_columns(topology: Topology, size: int, weights: Weights) -> None:
    """Check the columns of W for push-sum: nobody's share is lost, and the graph is strongly connected over time.
    ValueError: a column doesn't sum to one, or nothing of some workers ever reaches some others."""
    check(topology, size, weights, rows_too=False)


def check_symmetric(who: str, topology: Topology, size: int, weights: Weights, instead: str) -> None:
    """ValueError unless w_ij = w_ji in every step; `instead` is what else may be used."""
    for step in range(min(topology.period(size), CHECKED_STEPS)):
        matrix = mixing_matrix(topology, size, step, weights)
        apart = np.abs(matrix - matrix.T)
        i, j = np.unravel_index(int(apart.argmax()), apart.shape)
        if apart[i, j] > 1e-9:
            raise ValueError(
                f"{who} needs a symmetric mixing matrix, but on {topology.label(size)} worker {i} gives {j} "
                f"the weight {matrix[i, j]:.4g} and {j} gives {i} {matrix[j, i]:.4g}: "
                f"use a symmetric graph, or {instead}"
            )


def check_one_flight(rule: str, topology: Topology, size: int, delay: int) -> None:
    """ValueError unless every message lands before the next one leaves."""
    flights = most_in_flight(topology, size, delay)
    if flights > 1:
        raise ValueError(
            f"{rule} needs each message landed before the next leaves, but with delay {delay} {flights} are in flight "
            f"on {topology.label(size)}: use delay=1, or topology=Every({delay}, ...)"
        )


def check_equals(rule: str, topology: Topology, size: int, weights: Weights) -> None:
    """ValueError unless in every step that talks everybody receives from all, with equal weights."""
    for step in talking_steps(topology, size):
        for rank in range(size):
            row = weights.row(topology, rank, size, step)
            if len(row) < size or max(row.values()) - min(row.values()) > 1e-9:
                raise ValueError(
                    f"{rule} needs all workers to hear all with equal weights, but on {topology.label(size)} worker "
                    f"{rank} hears {len(row) - 1} of {size - 1}: use topology=Every(8, Complete()), or OuterNesterov()"
                )


def check_tree(rule: str, topology: Topology, size: int, weights: Weights) -> None:
    """ValueError unless all steps that talk have one graph, a tree on all workers, and the weights are `Dyadic`."""
    graphs = {step_graph(topology, size, step) for step in talking_steps(topology, size)}
    tree = nx.Graph([(i, j) for graph in graphs for i, heard in enumerate(graph.sources) for j in heard])
    symmetric = all(graph.symmetric for graph in graphs)
    if size > 1 and not (len(graphs) == 1 and symmetric and len(tree) == size and nx.is_tree(tree)):
        raise ValueError(
            f"{rule} needs one tree on all {size} workers, {topology.label(size)} isn't: use Tree(), Star() or "
            "FromGraph(networkx.minimum_spanning_tree(...))"
        )
    for step in talking_steps(topology, size):
        for rank in range(size):
            if weights.row(topology, rank, size, step) != Dyadic().row(topology, rank, size, step):
                raise ValueError(f"{rule} needs weights that are powers of two: use weights=Dyadic()")


CHECKED_STEPS = 16  # whose rows are summed; a plan with a longer period makes all of them in one way


def check(topology: Topology, size: int, weights: Weights | None = None, rows_too: bool = True) -> None:
    """See that a plan keeps the mean of the workers and lets news of every worker reach, in time, every other.
    ValueError: the topology can't serve `size`; a row names others than the sources, is negative or doesn't sum to one;
    a column doesn't sum to one; nothing of some workers reaches some others."""
    for step in range(min(topology.period(size), CHECKED_STEPS)):
        _check_sources(topology, size, step)
        rows = [(weights or Own()).row(topology, rank, size, step) for rank in range(size)]
        if rows_too:
            _check_rows(topology, rows, step)
        _check_columns(topology, rows, step)
    _check_connected(topology, size)


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
        # Not `>=`: NaN is to be refused, too.
        if not abs(sum(row.values()) - 1) < 1e-9:
            raise ValueError(
                f"{where} sum to {sum(row.values()):.6g}: they must sum to 1, give the rest to itself "
                "(combine=PushSum() needs no such rows)"
            )


def _check_columns(topology: Topology, rows: list[dict[int, float]], step: int) -> None:
    heard = [0.0] * len(rows)
    for row in rows:
        for rank, weight in row.items():
            heard[rank] += weight
    worst = max(range(len(rows)), key=lambda rank: abs(heard[rank] - 1))
    if abs(heard[worst] - 1) > 1e-9:
        raise ValueError(
            f"{topology.label(len(rows))}: the weights given to worker {worst} at step {step} sum to {heard[worst]:.6g}"
            ", so the mean would drift: use weights=MetropolisHastings() and a symmetric graph, "
            "or combine=PushSum() with weights=OutDegree()"
        )


def _check_connected(topology: Topology, size: int) -> None:
    everyone, news = set(range(size)), nx.DiGraph()  # an edge for each link by which news goes in a period
    news.add_nodes_from(everyone)
    graphs = {step_graph(topology, size, step) for step in range(topology.period(size))}
    news.add_edges_from((j, i) for graph in graphs for i, sources in enumerate(graph.sources) for j in sources)
    # News of each reaches all iff worker 0's reaches all, and everyone's reaches worker 0.
    below, above = {0, *nx.ancestors(news, 0)}, {0, *nx.descendants(news, 0)}
    for deaf, unheard in ((below, everyone - below), (everyone - above, above)):
        if deaf and unheard:
            raise ValueError(
                f"{topology.label(size)}: workers {_some(deaf)} never hear {_some(unheard)}: "
                "add edges between them, or use Auto()"
            )


def _some(workers: set[int]) -> str:
    shown = ", ".join(map(str, sorted(workers)[:8]))
    return "{" + shown + (", ..." if len(workers) > 8 else "") + "}"
