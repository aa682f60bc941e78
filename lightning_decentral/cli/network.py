"""`torchrun ... -m lightning_decentral.cli.network --model profile.json`: what messages cost on this network.

Started on all hosts as a training is, it measures every collective, and exchanges with one and several neighbours.
Groups lie inside a node and between nodes, with one flow and parallel ones; lines through them go into the profile."""

import argparse
import dataclasses
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
from rich.console import Console
from rich.table import Table

from lightning_decentral.cli.console import Parser, answer, number, refuse_unwritable, whole
from lightning_decentral.planner.network import SIZES, NetworkMeter
from lightning_decentral.planner.plan import host_links as files
from lightning_decentral.planner.plan.probes import Start, probes, refuse_starts
from lightning_decentral.shared.compute import cuda
from lightning_decentral.shared.compute.hardware import device_name
from lightning_decentral.shared.plan.profile import LinkCost, read, write
from lightning_decentral.shared.wire.meeting.groups import connect
from lightning_decentral.shared.wire.objects import gather_objects, gather_world
from lightning_decentral.shared.wire.transport import world


@dataclasses.dataclass(frozen=True)
class NetworkAnswer:
    """JSON answer: fitted lines of the measurements, and each host's device."""

    network: tuple[LinkCost, ...]
    hosts: dict[str, str]


def place(environment: Mapping[str, str]) -> tuple[int, int, int, int]:
    """Read (rank, size, local rank, workers of a node) from torchrun's variables. ValueError: one is missing."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    missing = [name for name in names if name not in environment]
    if missing:
        raise ValueError(
            f"{missing[0]} is not set: start it on every host with "
            "`torchrun --nnodes=... --nproc-per-node=... -m lightning_decentral.cli.network`"
        )
    rank, size, local_rank, per_node = (int(environment[name]) for name in names)
    return rank, size, local_rank, per_node


def device_of(local_rank: int, per_node: int) -> torch.device:
    """Return a CUDA device for the worker if the node has one for each worker, otherwise the CPU."""
    if cuda.device_count() < per_node:
        return torch.device("cpu")
    cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def unique(names: Sequence[str]) -> list[str]:
    """Make names unique by appending a number to repeated names."""
    return [f"{name}-{i}" if name in names[:i] else name for i, name in enumerate(names)]


def shown(costs: Sequence[LinkCost]) -> Table:
    table = Table(
        "operation", "reach", "workers", "flows", "neighbours", "latency us", "MB/s", "largest error", title="network"
    )
    for cost in costs:
        numbers = (cost.operation, cost.reach, str(cost.workers), str(cost.flows), str(cost.peers))
        fitted = f"{1e6 * cost.latency_seconds:.0f}", f"{cost.bytes_per_second / 1e6:,.0f}", f"{100 * cost.error:.0f}%"
        table.add_row(*numbers, *fitted)
    return table


def mistake(options: argparse.Namespace, rank: int) -> str:
    """Describe a mistake in this worker's options, or in worker 0's files; empty if there is none."""
    if min(options.sizes) < 1 or list(options.sizes) != sorted(set(options.sizes)):
        return f"sizes must be ascending numbers of bytes, got {list(options.sizes)}: --sizes 4096 1048576"
    if options.repeats < 1:
        return f"repeats must be at least 1, got {options.repeats}: 5 outlive a disturbance"
    if rank != 0:
        return ""
    try:
        read(options.model)
    except ValueError as error:
        return f"{error}, or copy it to this host"
    try:
        refuse_unwritable(options, ("out", "hosts"))
    except ValueError as error:
        return str(error)
    return ""


def run(options: argparse.Namespace) -> None:
    """Compare options and measure on all workers; worker 0 prints and writes the result."""
    rank, size, local_rank, per_node = place(os.environ)
    device = device_of(local_rank, per_node)
    timeout = timedelta(seconds=options.timeout_seconds)
    with world(timeout):
        # One that can't start reports it before the devices' groups are made: the others would wait for it there.
        asked = (tuple(options.sizes), options.repeats, options.longest_seconds, bool(options.hosts))
        starts = gather_world(Start(platform.node(), mistake(options, rank), per_node, device.type, *asked))
        refuse_starts(starts)
        plan = probes(size, per_node)
        wire = connect(device, timeout, "nccl" if device.type == "cuda" else "gloo")
        # Behind --json standard output is the answer alone.
        with Console(stderr=True, quiet=rank != 0).status("measuring") as status:
            meter = NetworkMeter(wire, device, options.sizes, options.repeats, options.longest_seconds, status.update)
            costs = meter.costs(plan)
            leaders = range(0, size, per_node)
            named = gather_objects(wire.flags, (platform.node(), device_name(device)))
            names = unique([named[leader][0] for leader in leaders])
            links = files.of(names, meter.links(leaders)) if options.hosts and len(names) > 1 else None
    if rank != 0:
        return
    hosts = {name: named[leader][1] for name, leader in zip(names, leaders, strict=True)}
    profile, out = read(options.model), options.out or options.model
    write(dataclasses.replace(profile, network=tuple(costs), hosts={**profile.hosts, **hosts}), out)
    wrote = [f"wrote {out}"]
    if links:
        links.write(options.hosts)
        wrote.append(f"wrote {options.hosts}: lightning-decentral placement {options.hosts}")
    answer(options, NetworkAnswer(tuple(costs), hosts), shown(costs), *wrote)


def parser() -> argparse.ArgumentParser:
    made = Parser(prog="python -m lightning_decentral.cli.network", description=__doc__.partition("\n")[0])
    made.add_argument(
        "--model", default="profile.json", help="file that `lightning-decentral profile` wrote, on worker 0's host"
    )
    made.add_argument("--out", help="the file to write (default: that one)")
    made.add_argument("--hosts", help="also measure every pair of hosts and write this file for `placement`")
    made.add_argument("--sizes", type=whole, nargs="+", default=SIZES, help="bytes of the messages, ascending")
    made.add_argument("--repeats", type=whole, default=5)
    made.add_argument(
        "--longest-seconds", type=number, default=0.5, help="stop at a message that takes longer than this"
    )
    made.add_argument(
        "--timeout-seconds", type=number, default=600.0, help="seconds to wait for a worker that doesn't answer"
    )
    made.add_argument("--json", action="store_true", help="answer with JSON (docs/commands.md)")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    try:
        run(options)
    except (ValueError, OSError) as error:  # a lost neighbour is an OSError, too
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
