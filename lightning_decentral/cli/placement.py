"""`lightning-decentral placement hosts.json --topology ring`: which host should get which rank."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.errors import MissingConfigException
from hydra.utils import instantiate
from rich.console import Console
from rich.table import Table

from lightning_decentral.cli.options import number, whole
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.planner.plan.host_links import HostLinks, read
from lightning_decentral.planner.plan.placement import (
    ChainPlacement,
    Graph,
    Listed,
    Placement,
    RingPlacement,
    Step,
    place,
)

SHAPES: dict[str, Graph] = {"ring": RingPlacement(), "pipeline": ChainPlacement()}


def graph(name: str, overrides: Sequence[str]) -> Graph:
    """`ring`, `pipeline`, or a topology of gossip by the name of its configuration.

    Raises:
        ValueError: no such topology, or words about one that has nothing to set.
    """
    if name in SHAPES and overrides:
        raise ValueError(f"--topology {name} has nothing to set, got {' '.join(overrides)}: leave it out")
    if name in SHAPES:
        return SHAPES[name]
    topology = f"strategy/topology={name}"
    with initialize_config_module("lightning_decentral.conf", version_base="1.3"):
        try:
            cfg = compose("train", ["strategy=gossip", topology, *overrides])
        except MissingConfigException as error:
            raise ValueError(f"no topology {name!r}: take pipeline, {', '.join(error.options or [])}") from None
    made: Topology = instantiate(cfg.strategy.topology, _convert_="all")
    return Listed(lambda size: messages(made, size))


def messages(topology: Topology, size: int) -> list[Step]:
    """Of one period, by (source, target)."""
    steps = range(topology.period(size))
    return [[(j, i) for i in range(size) for j in topology.sources(i, size, step)] for step in steps]


def shown(links: HostLinks, found: Placement) -> Table:
    table = Table("rank", "host", "was", title="exact" if found.exact else "by local search")
    for rank, host in enumerate(found.order):
        table.add_row(str(rank), links.hosts[host], links.hosts[rank])
    return table


def run(options: argparse.Namespace) -> None:
    links = read(options.hosts)
    if options.among:
        links = links.only(options.among.split(","))
    if options.message_bytes <= 0:
        raise ValueError(
            f"message bytes must be more than 0, got {options.message_bytes}: give those of the parameters"
        )
    shape = graph(options.topology, options.overrides)
    found = place(shape, links.seconds(options.message_bytes), seed=options.seed)
    names = [links.hosts[host] for host in found.order]
    console = Console()
    console.print(shown(links, found))
    (before, before_total), (after, after_total) = found.before, found.after
    console.print(
        f"slowest message of a step: {1e3 * before:.3f} ms as it was, {1e3 * after:.3f} ms now; "
        f"all messages of a step: {1e3 * before_total:.3f} ms, {1e3 * after_total:.3f} ms"
    )
    print(",".join(names))
    if options.hostfile:
        Path(options.hostfile).write_text("".join(f"{name}\n" for name in names))
        console.print(f"wrote {options.hostfile}, one host a line in order of rank")


def add(commands: Any) -> None:
    command = commands.add_parser("placement", help="which host should get which rank")
    command.add_argument("hosts", help="delays and bandwidths between hosts, JSON or CSV")
    command.add_argument("overrides", nargs="*", help="words about the topology: strategy.topology.max_degree=2")
    command.add_argument("--topology", default="ring", help="ring, pipeline, exponential, ... (default: %(default)s)")
    command.add_argument("--message-bytes", type=number, default=1e6, help="of one message (default: %(default)g)")
    command.add_argument("--among", help="place these hosts only, named with commas between")
    command.add_argument("--hostfile", help="write the hosts in order of rank to this file")
    command.add_argument("--seed", type=whole, default=0, help="of the local search")
    command.set_defaults(run=run, outputs=("hostfile",))
