"""Curves of a topology: its matrices and how fast workers agree (consensus), step by step."""

from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np

from lightning_decentral.gossip.plan.topology.topology import Topology, step_graph
from lightning_decentral.gossip.plan.weights import Matrix, consensus_steps, gap_per_step, mixing_matrix, spectral_gap
from lightning_decentral.shared.figure import ACCENT, INK, WORKER, new_figure

LONGEST = 64


@dataclass(frozen=True)
class Curves:
    """Mixing matrices and consensus curves of a topology on `size` workers.

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
    """Compute the curves of two periods, at most `LONGEST` steps.

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


def received(topology: Topology, size: int, step: int) -> str:
    """Graph of a step, as text: "0-1 2-3" where both receive from each other, "1>2" where 2 receives from 1."""
    rows = enumerate(step_graph(topology, size, step).sources)
    edges = {(source, rank) for rank, sources in rows for source in sources}
    mutual = sorted({(min(e), max(e)) for e in edges if e[::-1] in edges})
    directed = sorted(e for e in edges if e[::-1] not in edges)
    return " ".join([*(f"{a}-{b}" for a, b in mutual), *(f"{a}>{b}" for a, b in directed)]) or "silent"


SHOWN_STEPS = 6


def draw_topology(topology: Topology, size: int, found: Curves, path: Path) -> None:
    """The first steps as graphs on a circle, each with its matrix, and the consensus curve.

    Raises:
        ValueError: no matplotlib, a suffix that it doesn't write, or a folder that isn't there.
    """
    steps = min(len(found.matrices), SHOWN_STEPS)
    figure = new_figure(2.4 * max(steps, 3), 7)
    graphs, below = figure.subfigures(2, 1, height_ratios=[5, 3])
    rows = graphs.subplots(2, steps, squeeze=False)
    for step in range(steps):
        _graph(rows[0][step], topology, size, step)
        rows[1][step].imshow(found.matrices[step], cmap="Blues", vmin=0, vmax=1)
        rows[1][step].set_axis_off()
    _distances(below.subplots(), found)
    figure.suptitle(f"{topology.label(size)}, {size} workers", color=INK)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"--plot {path}: {error}") from None


def _graph(axes: Any, topology: Topology, size: int, step: int) -> None:
    graph = nx.DiGraph()
    graph.add_nodes_from(range(size))
    sources = step_graph(topology, size, step).sources
    graph.add_edges_from((source, rank) for rank, others in enumerate(sources) for source in others)
    dots = ceil(1200 / max(size, 8))
    options = {"node_size": dots, "node_color": WORKER, "edge_color": INK, "arrowsize": 6, "width": 0.7}
    nx.draw_networkx(graph, nx.circular_layout(graph), ax=axes, with_labels=size <= 16, font_size=6, **options)
    axes.set_title(f"step {step}", fontsize=9, color=INK)
    axes.set_axis_off()
    axes.set_aspect("equal")


def _distances(axes: Any, found: Curves) -> None:
    floor = 1e-16  # exact consensus is 0, for which a logarithmic axis has no place
    for curve, colour, label in ((found.distances, ACCENT, "worst start"), (found.typical, INK, "random start")):
        axes.semilogy([max(value, floor) for value in curve], color=colour, marker="o", markersize=3, label=label)
    axes.legend(frameon=False, fontsize=8)
    axes.set_ylim(bottom=floor / 3)
    axes.set_xlabel("step")
    axes.set_ylabel("distance from the mean left")
    axes.spines[["top", "right"]].set_visible(False)
