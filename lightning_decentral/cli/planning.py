"""`lightning-decentral plan profile.json --workers 64 --per-node 8`: what to train with, before it is trained."""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console

from lightning_decentral.cli.options import number, refuse_below, whole
from lightning_decentral.planner import show as units
from lightning_decentral.planner.compare import THRESHOLD, plan
from lightning_decentral.planner.report import page
from lightning_decentral.planner.show import sentences, table
from lightning_decentral.shared.plan.forecast import Cluster, Setting
from lightning_decentral.shared.plan.network import Network
from lightning_decentral.shared.plan.profile import Profile, read

LATENCY = "100us"


def add(commands: Any) -> None:
    parser = commands.add_parser("plan", help="predicted seconds per step of every method on a cluster, the best first")
    parser.add_argument("profile", nargs="?", help="file that `lightning-decentral profile` wrote")
    parser.add_argument("--workers", type=whole, help="devices in all")
    parser.add_argument("--per-node", type=whole, default=1, help="devices of a node (default 1)")
    parser.add_argument("--bandwidth", help="of a node's network card, in place of measurements: 200mbit")
    parser.add_argument("--latency", default=LATENCY, help=f"of a message with --bandwidth (default {LATENCY})")
    parser.add_argument("--inside-bandwidth", help="between devices of a node, in place of measurements: 200gbit")
    parser.add_argument("--inside-latency", default="10us", help="with --inside-bandwidth (default 10us)")
    parser.add_argument("--memory-bytes", help="of a device; what needs more isn't recommended: 24GB")
    parser.add_argument(
        "--slices", type=whole, default=1, help="of a sequence in a pipeline (default 1: no token axis)"
    )
    parser.add_argument("--threshold", type=number, default=100 * THRESHOLD, help="gain in %% under which ddp stays")
    parser.add_argument("--also", action="append", default=[], help="words of a further strategy; may be repeated")
    parser.add_argument("--report", type=Path, help="page to write: plan.html")
    parser.set_defaults(run=run, outputs=("report",))


def run(options: argparse.Namespace) -> None:
    if options.profile is None or options.workers is None:
        raise ValueError("plan needs a profile and --workers: lightning-decentral plan profile.json --workers 64")
    refuse_below(1, {"--workers": options.workers, "--per-node": options.per_node, "--slices": options.slices})
    refuse_below(0, {"--threshold": options.threshold})
    console = Console()
    profile = read(options.profile)
    setting = setting_of(profile, options)
    limit = units.size_bytes(options.memory_bytes) if options.memory_bytes is not None else None
    found = plan(
        setting,
        profile.variation,
        slices=options.slices,
        also=options.also,
        memory_bytes=limit,
        threshold=options.threshold / 100,
    )
    console.print(table(found))
    _say(console, sentences(found))
    if options.report:
        text = page(found, profile.variation, threshold=options.threshold / 100, slices=options.slices)
        _write(options.report, text)
        console.print(f"report: {options.report}", soft_wrap=True)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise ValueError(f"--report {path} can't be written: {error.strerror}") from None


def _say(console: Console, sentences: Iterable[str]) -> None:
    for sentence in sentences:
        console.print(sentence, soft_wrap=True, highlight=False, markup=False)


def setting_of(profile: Profile, options: argparse.Namespace) -> Setting:
    """The profile's model on the cluster and links of the command line."""
    network = Network(profile.network)
    latency, inside_latency = units.seconds(options.latency), units.seconds(options.inside_latency)
    if options.bandwidth is not None:
        rate = units.bytes_per_second(options.bandwidth)
        network = network.linked("between", latency, rate)
    if options.inside_bandwidth is not None:
        rate = units.bytes_per_second(options.inside_bandwidth)
        network = network.linked("inside", inside_latency, rate)
    return Setting(profile.model, network, Cluster(options.workers, options.per_node))
