"""`lightning-decentral topology base_graph --workers 24`: who receives from whom, and how fast all agree.

Its mixing matrices and their consensus curves, step by step."""

import argparse
import sys
from dataclasses import dataclass
from importlib.resources import files
from math import ceil
from pathlib import Path
from textwrap import fill
from typing import Any

import networkx as nx
import numpy as np
from rich.console import Console

from lightning_decentral.cli.console import answer, refuse_below, whole
from lightning_decentral.gossip.plan.checks import check
from lightning_decentral.gossip.plan.topology.topology import Topology, step_graph
from lightning_decentral.gossip.plan.weights import (
    Matrix,
    consensus_steps,
    describe,
    gap_per_step,
    mixing_matrix,
    spectral_gap,
)
from lightning_decentral.gossip.strategy import GossipStrategy
from lightning_decentral.planner.forecasts import strategy_of
from lightning_decentral.shared.plan.figure import ACCENT, INK, WORKER, new_figure
from lightning_decentral.shared.plan.kinds import meant

LONG_SIZE, LARGEST_SIZE = 256, 2048  # workers that take more than seconds; more than an hour, or all memory
WIDTH = 80  # columns
PRINTED_SIZE = 16  # workers whose matrices fit on a screen
LONGEST, SHOWN_STEPS = 64, 6  # steps of the curves, and of the picture


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="name of the topology, as in strategy/topology=NAME: ring, base_graph, auto, ...")
    parser.add_argument("overrides", nargs="*", help="overrides of the topology's fields: max_degree=2")
    parser.add_argument("--workers", type=whole, required=True)
    parser.add_argument(
        "--per-node", type=whole, default=1, help="workers that share a node, for topologies that use it"
    )
    parser.add_argument("--plot", type=Path, help="picture to write: topology.png")
    parser.set_defaults(run=run, outputs=("plot",))


def names() -> list[str]:
    group = files("lightning_decentral.conf") / "strategy" / "topology"
    return sorted(file.name.removesuffix(".yaml") for file in group.iterdir() if file.name.endswith(".yaml"))


def topology_of(name: str, overrides: list[str]) -> Topology:
    """Topology by its Hydra name. ValueError: an unknown name or field."""
    if name not in names():
        raise ValueError(f"there is no topology {name!r}: {meant(name, names())}use one of {', '.join(names())}")
    fields = [f"strategy.topology.{override}" for override in overrides]
    strategy = strategy_of(" ".join(["strategy=gossip", f"strategy/topology={name}", *fields]))
    assert isinstance(strategy, GossipStrategy)
    return strategy.topology


@dataclass(frozen=True)
class Curves:
    """Mixing matrices and consensus curves of a topology on `size` workers."""

    matrices: tuple[Matrix, ...]  # mixing matrices of a period, at most `LONGEST` steps
    gaps: tuple[float, ...]  # 1 - the second largest |eigenvalue| of each matrix
    # ||W_t ... W_0 - 1 1^T / n||_2 after each step: the largest share of their distance from the mean that workers may
    # still have; step 0 is before any.
    distances: tuple[float, ...]
    # ||W_t ... W_0 - 1 1^T / n||_F / sqrt(n - 1): that share (root mean square) for a random start.
    typical: tuple[float, ...]
    exact: int | None  # steps to exact consensus, None: never
    gap_per_step: float


def curves(topology: Topology, size: int) -> Curves:
    """Compute the curves of two periods, at most `LONGEST` steps. ValueError: the topology can't serve this size."""
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
    """Graph of a step, as text.

    "0-1 2-3" where both receive from each other, "1>2" where 2 receives from 1, "all of 0..3" where four or more do."""
    rows = enumerate(step_graph(topology, size, step).sources)
    edges = {(source, rank) for rank, sources in rows for source in sources}
    mutual = nx.Graph(e for e in edges if e[::-1] in edges)
    directed = sorted(e for e in edges if e[::-1] not in edges)
    groups = [group for group in nx.connected_components(mutual) if len(group) > 3]
    whole = [group for group in groups if all(len(mutual[rank]) == len(group) - 1 for rank in group)]
    mutual.remove_nodes_from([rank for group in whole for rank in group])
    cliques = (f"all of {_ranks(group)}" for group in sorted(map(sorted, whole)))
    pairs = (f"{a}-{b}" for a, b in sorted(map(sorted, mutual.edges)))
    return " ".join([*cliques, *pairs, *(f"{a}>{b}" for a, b in directed)]) or "silent"


def _ranks(group: list[int]) -> str:
    """Text of sorted ranks: "0..3" or "0,2,4,6"."""
    dense = group[-1] - group[0] == len(group) - 1
    return f"{group[0]}..{group[-1]}" if dense else ",".join(map(str, group))


def run(options: argparse.Namespace) -> None:
    refuse_below(1, {"--workers": options.workers, "--per-node": options.per_node})
    if (size := options.workers) > LARGEST_SIZE:
        raise ValueError(
            f"--workers {size} makes matrices of {size} x {size}: give at most {LARGEST_SIZE}, from where on the "
            "numbers hardly change"
        )
    if size > LONG_SIZE:
        print(f"matrices of {size} x {size}: this may take minutes ...", file=sys.stderr, flush=True)
    topology = topology_of(options.name, options.overrides).placed(options.per_node)
    check(topology, size)
    with Console(stderr=True).status(f"curves of {size} workers"):
        found = curves(topology, size)
    if options.plot:
        draw_topology(topology, size, found, options.plot)
    picture = [f"picture: {options.plot}"] if options.plot else []
    distances = found.gaps, found.distances, found.typical
    numbers = TopologyAnswer(repr(topology), size, topology.period(size), found.gap_per_step, *map(list, distances))
    answer(options, numbers, *lines(topology, size, found), *picture)


@dataclass(frozen=True)
class TopologyAnswer:
    """JSON answer of `topology`: spectral gaps of a period's steps, distances from the mean after 0, 1, ... steps."""

    topology: str
    workers: int
    period: int
    gap_per_step: float
    gaps: list[float]
    worst_start: list[float]
    random_start: list[float]


def lines(topology: Topology, size: int, found: Curves) -> list[str]:
    period = topology.period(size)
    # One step of a graph that is exact after several mixes only some workers, which a gap of 0 would show like a fault.
    gaps = ["" if found.exact is not None else f"spectral gap {gap:.3g}: " for gap in found.gaps]
    shown = [f"step {step}: {gap}{received(topology, size, step)}" for step, gap in enumerate(gaps)]
    mixes = "exact in finite time" if found.exact is not None else f"spectral gap per step {found.gap_per_step:.3g}"
    left = [f"... {period - len(found.gaps)} more steps"] if period > len(found.gaps) else []
    matrices = [np.array2string(m, precision=3, max_line_width=WIDTH) for m in found.matrices if size <= PRINTED_SIZE]
    worst, typical = (" ".join(f"{left:.2g}" for left in curve) for curve in (found.distances, found.typical))
    return [
        _wrapped(describe(topology, size)),
        f"period: {period} step{'s' if period > 1 else ''}, {mixes}",
        *map(_wrapped, shown),
        *left,
        *(f"matrix of step {step}:\n{matrix}" for step, matrix in enumerate(matrices)),
        _wrapped(f"distance from the mean that is left after 0, 1, ... steps, worst start: {worst}"),
        _wrapped(f"random start: {typical}"),
    ]


def _wrapped(line: str) -> str:
    return fill(line, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def draw_topology(topology: Topology, size: int, found: Curves, path: Path) -> None:
    """Draw the first steps as graphs on a circle, each with its matrix, and the consensus curve. ValueError: no
    matplotlib, a suffix that it doesn't write, or a folder that isn't there."""
    steps = min(len(found.matrices), SHOWN_STEPS)
    figure = new_figure(2.4 * max(steps, 3), 7)
    graphs, below = figure.subfigures(2, 1, height_ratios=[5, 3])
    rows = graphs.subplots(2, steps, squeeze=False)
    for step in range(steps):
        _graph(rows[0][step], topology, size, step)
        rows[1][step].imshow(found.matrices[step], cmap="Blues", vmin=0, vmax=1)
        rows[1][step].set_axis_off()
    axes = below.subplots()
    floor = 1e-16  # exact consensus is 0, for which a logarithmic axis has no place
    for curve, colour, label in ((found.distances, ACCENT, "worst start"), (found.typical, INK, "random start")):
        axes.semilogy([max(value, floor) for value in curve], color=colour, marker="o", markersize=3, label=label)
    axes.legend(frameon=False, fontsize=8)
    axes.set_ylim(bottom=floor / 3)
    axes.set_xlabel("step")
    axes.set_ylabel("distance from the mean left")
    axes.spines[["top", "right"]].set_visible(False)
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
