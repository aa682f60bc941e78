"""`lightning-decentral plan profile.json --workers 64 --per-node 8`: what to train with, before it is trained."""

import argparse
from dataclasses import dataclass
from math import inf
from pathlib import Path

from rich.console import Console

from lightning_decentral.cli.console import Command, answer, filled, number, refuse_below, say, whole, write_text
from lightning_decentral.cli.quantities import RATE, SIZE, SPAN
from lightning_decentral.planner.compare import THRESHOLD, plan
from lightning_decentral.planner.report import page
from lightning_decentral.planner.show import sentences, table
from lightning_decentral.shared.plan import units
from lightning_decentral.shared.plan.forecast import Cluster, Setting
from lightning_decentral.shared.plan.known_losses import RECIPES
from lightning_decentral.shared.plan.network import Network
from lightning_decentral.shared.plan.profile import read

LATENCY, INSIDE_LATENCY = "100us", "10us"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("profile", nargs="?", help="file that `lightning-decentral profile` wrote")
    parser.add_argument("--workers", type=whole, help="number of devices in all")
    parser.add_argument("--per-node", type=whole, help="devices in a node (default 1)")
    parser.add_argument("--bandwidth", type=RATE, help="node bandwidth, used instead of a measured network: 200mbit")
    parser.add_argument("--latency", type=SPAN, help=f"latency of a message, with --bandwidth (default {LATENCY})")
    parser.add_argument("--inside-bandwidth", type=RATE, help="as --bandwidth, between devices of a node: 200gbit")
    parser.add_argument(
        "--inside-latency", type=SPAN, help=f"latency of a message, with --inside-bandwidth (default {INSIDE_LATENCY})"
    )
    parser.add_argument("--memory-bytes", type=SIZE, help="memory of a device; what needs more isn't recommended: 24GB")
    parser.add_argument(
        "--slices", type=whole, default=1, help="slices of a sequence in a pipeline (default 1: no token axis)"
    )
    parser.add_argument(
        "--threshold",
        type=number,
        help=f"recommend another method only above this gain over ddp in %% (default {THRESHOLD:.0%}%)",
    )
    parser.add_argument(
        "--optimizer", help="optimizer of all methods: muon, from a profile with adamw (default: the profile's)"
    )
    parser.add_argument(
        "--like",
        choices=tuple(RECIPES),
        help="recipe whose measured losses rank a model of your own (default: its own)",
    )
    parser.add_argument(
        "--also", action="append", default=[], help="overrides of another strategy to compare; may be repeated"
    )
    parser.add_argument("--report", type=Path, help="page to write: plan.html")
    parser.set_defaults(run=run, outputs=("report",))


def run(options: argparse.Namespace) -> None:
    if options.profile is None or options.workers is None:
        raise ValueError("plan needs a profile and --workers: lightning-decentral plan profile.json --workers 64")
    assumed = assumptions(options)
    if options.workers == 1:
        raise ValueError("--workers must be at least 2, got 1: one worker exchanges with nobody, so there's no plan")
    refuse_below(1, {"--workers": options.workers, "--per-node": options.per_node, "--slices": options.slices})
    refuse_below(0, {"--threshold": options.threshold})
    profile = read(options.profile)
    network = Network(profile.network)
    for reach, rate, latency in (
        ("between", options.bandwidth, options.latency),
        ("inside", options.inside_bandwidth, options.inside_latency),
    ):
        if rate is not None:
            network = network.linked(reach, latency, rate)
    setting = Setting(profile.model, network, Cluster(options.workers, options.per_node))
    with Console(stderr=True).status("forecasting every method") as status:
        found = plan(
            setting,
            profile.variation,
            slices=options.slices,
            also=options.also,
            memory_bytes=inf if options.memory_bytes is None else options.memory_bytes,
            threshold=options.threshold / 100,
            optimizer=options.optimizer,
            like=RECIPES.get(options.like),
            say=lambda title: status.update(f"forecasting every method: {title}"),
        )
    methods = [
        filled(
            MethodAnswer,
            row.forecast,
            title=row.candidate.title,
            words=row.candidate.overrides,
            speedup=found.speedup(row),
            batches_share=None if row.share == inf else row.share,
            reaches=None if row.share is None else row.share < inf,
            fits=found.fits(row),
            remark=row.candidate.remark,
        )
        for row in found.rows
    ]
    cluster, best = setting.cluster, found.best.candidate.title if found.best else None
    command = found.command if found.best else None
    losses = str(found.known) if found.known else None
    numbers = PlanAnswer(cluster.workers, cluster.nodes, methods, found.refused, best, command, assumed, losses)
    *prose, last = sentences(found)
    answer(options, numbers, table(found), *assumed, *prose, Command(last) if command else last)
    if options.report:
        with Console(stderr=True).status("forecasting other clusters for the report"):
            text = page(found)
        write_text("--report", options.report, text)
        if not options.json:
            say(Console(highlight=False), f"report: {options.report}")


@dataclass(frozen=True)
class MethodAnswer:
    """JSON row of a method: seconds of a step, bytes of a node's card in a step and of a device's memory."""

    title: str
    words: str
    seconds: float
    p50_seconds: float
    p95_seconds: float
    exposed_seconds: float
    card_bytes: float
    memory_bytes: float
    speedup: float
    batches_share: float | None
    reaches: bool | None
    extrapolated: bool
    fits: bool
    remark: str


@dataclass(frozen=True)
class PlanAnswer:
    """JSON answer of `plan`: methods in the table's order. `best` is a title, or null if no method fits; `losses_of`
    names the setting in which losses were measured, or is null."""

    workers: int
    nodes: int
    methods: list[MethodAnswer]
    refused: dict[str, str]
    best: str | None
    command: str | None
    assumptions: list[str]
    losses_of: str | None


def assumptions(options: argparse.Namespace) -> list[str]:
    """Fill in defaults of options that weren't given, and return a sentence on each."""
    inside, gain = f"{INSIDE_LATENCY} for a message inside a node", 100 * THRESHOLD
    wanted = [
        ("per_node", 1, "one device on each node", True),
        ("latency", units.seconds(LATENCY), f"{LATENCY} for a message between nodes", bool(options.bandwidth)),
        ("inside_latency", units.seconds(INSIDE_LATENCY), inside, bool(options.inside_bandwidth)),
        ("threshold", gain, f"a gain under {gain:g} % is worth no change of method", True),
    ]
    assumed = []
    for name, value, text, matters in wanted:
        if getattr(options, name) is None:
            setattr(options, name, value)
            assumed += [f"assumed: {text} (--{name.replace('_', '-')})"] if matters else []
    return assumed
