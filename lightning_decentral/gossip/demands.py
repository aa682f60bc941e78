"""What some rules demand of a plan: columns only, symmetry, one message at a time, corrections that may come back."""

from collections.abc import Iterator
from functools import lru_cache

import networkx as nx
import numpy as np

from lightning_decentral.gossip.plan import Topology, step_graph
from lightning_decentral.gossip.stability import Echo, Matrix, echoed_growth, spectrum
from lightning_decentral.gossip.weights import (
    CHECKED_STEPS,
    Dyadic,
    Weights,
    _check_columns,
    _check_connected,
    _check_sources,
    mixing_matrix,
    most_in_flight,
    talking_steps,
)

LARGEST_STATE = 1024  # rows; about a second for each rate that is tried
CONTRACTS = 1 - 1e-9


def check_columns(topology: Topology, size: int, weights: Weights) -> None:
    """What of `weights.check` push-sum needs: nobody's share is lost, and everyone hears of everyone in time.

    Raises:
        ValueError: a column doesn't sum to one, or some workers never hear some others.
    """
    for step in range(min(topology.period(size), CHECKED_STEPS)):
        _check_sources(topology, size, step)
        rows = [weights.row(topology, rank, size, step) for rank in range(size)]
        _check_columns(topology, rows, step)
    _check_connected(topology, size)


def check_symmetric(who: str, topology: Topology, size: int, weights: Weights, instead: str) -> None:
    """ValueError unless w_ij = w_ji in every step; `instead` is what else may be used."""
    for step in range(min(topology.period(size), CHECKED_STEPS)):
        matrix = mixing_matrix(topology, size, step, weights)
        apart = np.abs(matrix - matrix.T)
        i, j = np.unravel_index(int(apart.argmax()), apart.shape)
        if apart[i, j] > 1e-9:
            raise ValueError(
                f"{who} needs a symmetric mixing matrix, but on {topology.label(size)} worker {i} gives {j} the "
                f"weight {matrix[i, j]:.4g} and {j} gives {i} {matrix[j, i]:.4g}: use a graph where all hear those who "
                f"hear them, or {instead}"
            )


def check_one_flight(rule: str, topology: Topology, size: int, delay: int) -> None:
    """ValueError unless every message lands before the next one leaves."""
    flights = most_in_flight(topology, size, delay)
    if flights > 1:
        raise ValueError(
            f"{rule} needs each message landed before the next leaves, but with delay {delay} {flights} are in flight "
            f"on {topology.label(size)}: use delay=1, or topology=Every({delay}, ...)"
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


@lru_cache(maxsize=64)
def largest_rate_with_echo(topology: Topology, size: int, delay: int, weights: Weights, echo: Echo) -> float:
    """The largest rate up to 1 at which mixing contracts although each correction comes back; 2 if it does at 1.

    One matrix, perhaps in every k-th step only: each eigenvalue by itself. A sequence of matrices: one period as a
    linear map, which must not be too large.

    Raises:
        ValueError: it is too large.
    """
    periods = list(_periods(topology, size, delay, weights))

    def contracts(rate: float) -> bool:
        return all(echoed_growth(blocks, delay, rate, echo) < CONTRACTS for blocks in periods)

    if contracts(1.0):
        return 2.0
    stable, unstable = 0.0, 1.0
    while unstable - stable > 1e-3:
        middle = (stable + unstable) / 2
        stable, unstable = (middle, unstable) if contracts(middle) else (stable, middle)
    return stable


def _periods(topology: Topology, size: int, delay: int, weights: Weights) -> Iterator[list[Matrix]]:
    """W_t - I of a period's steps without the mean: one system for each eigenvalue, or all in one."""
    talking = talking_steps(topology, size)
    steps = range(topology.period(size))
    if len(talking) <= 1:
        for value in _eigenvalues(mixing_matrix(topology, size, talking[0] if talking else 0, weights)):
            yield [np.full((1, 1), value - 1 if step in talking else 0.0) for step in steps]
        return
    if (size - 1) * (max(1, delay) + 1) > LARGEST_STATE:
        raise ValueError(
            f"{topology.label(size)} changes over {len(steps)} steps, which is too large to judge for {size} workers "
            f"with delay {delay}: use a topology of one matrix, such as Ring(), Torus() or Exponential()"
        )
    apart = np.linalg.svd(np.ones((1, size)))[2][1:]  # orthonormal rows that span what is orthogonal to the mean
    yield [apart @ (mixing_matrix(topology, size, step, weights) - np.eye(size)) @ apart.T for step in steps]


def _eigenvalues(matrix: Matrix) -> list[complex]:
    """All but one eigenvalue 1, each once."""
    values = spectrum(matrix)
    rest = np.delete(values, np.argmin(np.abs(values - 1)))
    return list(dict.fromkeys(complex(v) for v in np.round(rest, 9)))
