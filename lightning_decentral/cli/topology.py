"""`lightning-decentral topology base_graph --workers 24`: who receives from whom, and how fast all agree."""

import argparse
import sys
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
from rich.console import Console

from lightning_decentral.cli.console import answer, refuse_below, whole
from lightning_decentral.gossip.plan.checks import check
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import describe
from lightning_decentral.gossip.strategy import GossipStrategy
from lightning_decentral.planner.forecasts import strategy_of
from lightning_decentral.planner.topology_curves import Curves, curves, draw_topology, received

LONG_SIZE, LARGEST_SIZE = 256, 2048  # workers that take more than seconds; more than an hour, or all memory
PRINTED_SIZE = 16  # workers whose matrices fit on a screen


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="as in strategy/topology=NAME: ring, base_graph, auto, ...")
    parser.add_argument("overrides", nargs="*", help="of its fields: max_degree=2")
    parser.add_argument("--workers", type=whole, required=True)
    parser.add_argument("--per-node", type=whole, default=1, help="workers that share a node, for those that ask")
    parser.add_argument("--plot", type=Path, help="picture to write: topology.png")
    parser.set_defaults(run=run, outputs=("plot",))


def names() -> list[str]:
    group = files("lightning_decentral.conf") / "strategy" / "topology"
    return sorted(file.name.removesuffix(".yaml") for file in group.iterdir() if file.name.endswith(".yaml"))


def topology_of(name: str, overrides: list[str]) -> Topology:
    """Topology by its Hydra name.

    Raises:
        ValueError: an unknown name or field.
    """
    if name not in names():
        raise ValueError(f"there is no topology {name!r}: use one of {', '.join(names())}")
    fields = [f"strategy.topology.{override}" for override in overrides]
    strategy = strategy_of(" ".join(["strategy=gossip", f"strategy/topology={name}", *fields]))
    assert isinstance(strategy, GossipStrategy)
    return strategy.topology


def run(options: argparse.Namespace) -> None:
    refuse_below(1, {"--workers": options.workers, "--per-node": options.per_node})
    refuse_endless(options.workers)
    topology = topology_of(options.name, options.overrides).placed(options.per_node)
    check(topology, options.workers)
    with Console(stderr=True).status(f"curves of {options.workers} workers"):
        found = curves(topology, options.workers)
    if options.plot:
        draw_topology(topology, options.workers, found, options.plot)
    picture = [f"picture: {options.plot}"] if options.plot else []
    gaps, worst, typical = ([float(x) for x in row] for row in (found.gaps, found.distances, found.typical))
    size, period = options.workers, topology.period(options.workers)
    numbers = TopologyAnswer(repr(topology), size, period, float(found.gap_per_step), gaps, worst, typical)
    answer(options, numbers, *lines(topology, size, found), *picture)


@dataclass(frozen=True)
class TopologyAnswer:
    """The answer: spectral gaps by step of the period, distances from the mean left after 0, 1, ... steps."""

    topology: str
    workers: int
    period: int
    gap_per_step: float
    gaps: list[float]
    worst_start: list[float]
    random_start: list[float]


def refuse_endless(workers: int) -> None:
    """ValueError for matrices that nobody waits for; a message on stderr for what takes long."""
    if workers > LARGEST_SIZE:
        raise ValueError(
            f"--workers {workers} makes matrices of {workers} x {workers}: give at most {LARGEST_SIZE}, from where on "
            "the numbers hardly change"
        )
    if workers > LONG_SIZE:
        print(f"matrices of {workers} x {workers}: this may take minutes ...", file=sys.stderr, flush=True)


def lines(topology: Topology, size: int, found: Curves) -> list[str]:
    period = topology.period(size)
    shown = [
        f"step {step}: spectral gap {gap:.3g}: {received(topology, size, step)}" for step, gap in enumerate(found.gaps)
    ]
    left = [f"... {period - len(found.gaps)} more steps"] if period > len(found.gaps) else []
    matrices = [np.array2string(m, precision=3, max_line_width=160) for m in found.matrices if size <= PRINTED_SIZE]
    worst, typical = (" ".join(f"{left:.2g}" for left in curve) for curve in (found.distances, found.typical))
    return [
        describe(topology, size),
        f"period: {period} step{'s' if period > 1 else ''}, spectral gap per step {found.gap_per_step:.3g}",
        *shown,
        *left,
        *(f"matrix of step {step}:\n{matrix}" for step, matrix in enumerate(matrices)),
        f"distance from the mean that is left after 0, 1, ... steps, worst start: {worst}",
        f"random start: {typical}",
    ]
