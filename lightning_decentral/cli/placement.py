"""`lightning-decentral placement hosts.json --topology ring`: which host should get which rank."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra import compose, initialize_config_module
from hydra.errors import MissingConfigException
from hydra.utils import instantiate
from rich.console import Console
from rich.table import Table

from lightning_decentral.cli.console import answer, number, whole
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.planner.plan.host_links import read
from lightning_decentral.planner.plan.placement import ChainPlacement, Graph, Listed, RingPlacement, Step, place

MESSAGE_BYTES = 1e6
SHAPES: dict[str, Graph] = {"ring": RingPlacement(), "pipeline": ChainPlacement()}


def graph(name: str, overrides: Sequence[str]) -> Graph:
    """Make the message graph of `ring`, `pipeline`, or a gossip topology by its configuration's name. ValueError: an
    unknown topology, or overrides for one without settings."""
    if name in SHAPES and overrides:
        raise ValueError(f"--topology {name} has nothing to set, got {' '.join(overrides)}: leave it out")
    if name in SHAPES:
        return SHAPES[name]
    with initialize_config_module("lightning_decentral.conf", version_base="1.3"):
        try:
            cfg = compose("train", ["strategy=gossip", f"strategy/topology={name}", *overrides])
        except MissingConfigException as error:
            raise ValueError(f"no topology {name!r}: take pipeline, {', '.join(error.options or [])}") from None
    made: Topology = instantiate(cfg.strategy.topology, _convert_="all")

    def messages(size: int) -> list[Step]:  # of one period
        steps = range(made.period(size))
        return [[(j, i) for i in range(size) for j in made.sources(i, size, step)] for step in steps]

    return Listed(messages)


def run(options: argparse.Namespace) -> None:
    links = read(options.hosts)
    if options.among:
        links = links.only(options.among.split(","))
    size_bytes = MESSAGE_BYTES if options.message_bytes is None else options.message_bytes
    if size_bytes <= 0:
        raise ValueError(f"message bytes must be more than 0, got {size_bytes}: give those of the parameters")
    shape = graph(options.topology, options.overrides)
    with Console(stderr=True).status("searching orders of the hosts"):
        found = place(shape, links.seconds(size_bytes), seed=options.seed)
    names = [links.hosts[host] for host in found.order]
    (before, before_total), (after, after_total) = found.before, found.after
    gain = (
        f"slowest message of a step: {1e3 * before:.3f} ms as it was, {1e3 * after:.3f} ms now; "
        f"all messages of a step: {1e3 * before_total:.3f} ms, {1e3 * after_total:.3f} ms"
    )
    wrote = []
    if options.hostfile:
        wrote = [f"wrote {options.hostfile}, one host a line in order of rank"]
        Path(options.hostfile).write_text("".join(f"{name}\n" for name in names))
    placed = Placed(names, found.exact, before, after, before_total, after_total)
    assumed = [f"assumed: messages of {size_bytes:g} bytes (--message-bytes)"] * (options.message_bytes is None)
    table = Table("rank", "host", "was", title="exact" if found.exact else "by local search")
    for rank, (host, before_host) in enumerate(zip(names, links.hosts, strict=True)):
        table.add_row(str(rank), host, before_host)
    answer(options, placed, *assumed, table, gain, ",".join(names), *wrote)


@dataclass(frozen=True)
class Placed:
    """JSON answer of `placement`: hosts in order of rank; seconds of a step's slowest message and of all messages."""

    hosts: list[str]
    exact: bool
    slowest_before_seconds: float
    slowest_after_seconds: float
    all_before_seconds: float
    all_after_seconds: float


def add(command: argparse.ArgumentParser) -> None:
    command.add_argument("hosts", help="delays and bandwidths between hosts, JSON or CSV")
    command.add_argument("overrides", nargs="*", help="overrides of the topology: strategy.topology.max_degree=2")
    command.add_argument("--topology", default="ring", help="ring, pipeline, exponential, ... (default: %(default)s)")
    command.add_argument("--message-bytes", type=number, help=f"bytes of one message (default: {MESSAGE_BYTES:g})")
    command.add_argument("--among", help="place only these hosts, separated by commas")
    command.add_argument("--hostfile", help="write the hosts in order of rank to this file")
    command.add_argument("--seed", type=whole, default=0, help="seed of the local search")
    command.set_defaults(run=run, outputs=("hostfile",))
