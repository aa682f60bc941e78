"""Pictures of topologies. Needs matplotlib (extra `plot`)."""

from math import ceil
from pathlib import Path
from typing import Any

import networkx as nx

from lightning_decentral.figure import ACCENT, INK, WORKER, new_figure
from lightning_decentral.gossip.plan import Topology, step_graph
from lightning_decentral.planning.curves import Curves

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
    graph.add_edges_from((source, rank) for rank, heard in enumerate(sources) for source in heard)
    dots = ceil(1200 / max(size, 8))
    options = {"node_size": dots, "node_color": WORKER, "edge_color": INK, "arrowsize": 6, "width": 0.7}
    nx.draw_networkx(graph, nx.circular_layout(graph), ax=axes, with_labels=size <= 16, font_size=6, **options)
    axes.set_title(f"step {step}", fontsize=9, color=INK)
    axes.set_axis_off()
    axes.set_aspect("equal")


def _distances(axes: Any, found: Curves) -> None:
    floor = 1e-16
    for curve, colour, label in ((found.distances, ACCENT, "worst start"), (found.typical, INK, "random start")):
        axes.semilogy([max(value, floor) for value in curve], color=colour, marker="o", markersize=3, label=label)
    axes.legend(frameon=False, fontsize=8)
    axes.set_ylim(bottom=floor / 3)
    axes.set_xlabel("step")
    axes.set_ylabel("distance from the mean left")
    axes.spines[["top", "right"]].set_visible(False)
