"""What a topology does over steps: its matrices and how fast workers agree."""

from dataclasses import dataclass

import numpy as np

from lightning_decentral.gossip.plan import Topology, step_graph
from lightning_decentral.gossip.stability import Matrix, spectral_gap
from lightning_decentral.gossip.weights import consensus_steps, gap_per_step, mixing_matrix

LONGEST = 64


@dataclass(frozen=True)
class Curves:
    """Of a topology on `size` workers.

    Args:
        matrices: of a period, at most `LONGEST` steps.
        gaps: 1 - the second largest |eigenvalue| of each.
        distances: ||W_t ... W_0 - 1 1^T / n||_2 after each step: the largest share of their distance from the mean that
            workers may still have; step 0 is before any.
        typical: ||W_t ... W_0 - 1 1^T / n||_F / sqrt(n - 1): that share (root mean square) for a random start.
        exact: steps to exact consensus, None: never.
    """

    matrices: tuple[Matrix, ...]
    gaps: tuple[float, ...]
    distances: tuple[float, ...]
    typical: tuple[float, ...]
    exact: int | None
    gap_per_step: float


def curves(topology: Topology, size: int) -> Curves:
    """Of two periods, at most `LONGEST` steps.

    Raises:
        ValueError: the topology can't serve `size` workers.
    """
    period = topology.period(size)
    shown = [mixing_matrix(topology, size, step) for step in range(min(period, LONGEST))]
    product, mean, left = np.eye(size), np.full((size, size), 1 / size), [np.eye(size) - 1 / size]
    for step in range(min(LONGEST, max(2 * period, 8))):
        product = mixing_matrix(topology, size, step) @ product
        left.append(product - mean)
    distances = tuple(float(np.linalg.norm(matrix, 2)) for matrix in left)
    typical = tuple(float(np.linalg.norm(matrix) / max(1, size - 1) ** 0.5) for matrix in left)
    gaps = tuple(float(spectral_gap(matrix)) for matrix in shown)
    exact = consensus_steps(topology, size)
    return Curves(tuple(shown), gaps, distances, typical, exact, gap_per_step(topology, size))


def heard(topology: Topology, size: int, step: int) -> str:
    """Who hears whom at a step: "0-1 2-3" where both hear each other, "1>2" where 2 hears 1."""
    edges = {
        (source, rank) for rank, sources in enumerate(step_graph(topology, size, step).sources) for source in sources
    }
    mutual = sorted({(min(e), max(e)) for e in edges if e[::-1] in edges})
    directed = sorted(e for e in edges if e[::-1] not in edges)
    return " ".join([*(f"{a}-{b}" for a, b in mutual), *(f"{a}>{b}" for a, b in directed)]) or "silent"
