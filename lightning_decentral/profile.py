"""`torchrun ... -m lightning_decentral.profile --model profile.json`: what messages cost on this network.

Started on all hosts as a training is, it measures every collective and the exchange with a neighbour on groups inside
a node and between nodes, one flow and parallel ones, and puts lines through them into the profile.
"""

import argparse
import dataclasses
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lightning_decentral import hosts as files
from lightning_decentral.hardware import Cost, Profile, read, write
from lightning_decentral.hosts import Links
from lightning_decentral.machine import device_name
from lightning_decentral.network import SIZES, Meter
from lightning_decentral.probes import probes, refuse_alone
from lightning_decentral.transport import connect, gather_objects, gather_world, world


def place(environment: Mapping[str, str]) -> tuple[int, int, int, int]:
    """(rank, size, local rank, workers of a node) that torchrun gave.

    Raises:
        ValueError: it gave none.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    missing = [name for name in names if name not in environment]
    if missing:
        raise ValueError(
            f"{missing[0]} is not set: start it on every host with "
            "`torchrun --nnodes=... --nproc-per-node=... -m lightning_decentral.profile`"
        )
    rank, size, local_rank, per_node = (int(environment[name]) for name in names)
    return rank, size, local_rank, per_node


def refuse(options: argparse.Namespace) -> None:
    """ValueError for sizes and numbers that measure nothing."""
    if min(options.sizes) < 1 or list(options.sizes) != sorted(set(options.sizes)):
        raise ValueError(f"sizes must be ascending numbers of bytes, got {list(options.sizes)}: --sizes 4096 1048576")
    if options.repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {options.repeats}: 5 outlive a disturbance")


def device_of(local_rank: int, per_node: int) -> torch.device:
    """A CUDA device of its own where the node has one for each worker, otherwise the CPU."""
    if torch.cuda.device_count() < per_node:
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def terms(options: argparse.Namespace, device: torch.device, per_node: int) -> dict[str, Any]:
    """What all workers must have alike, since each takes part in every measurement."""
    words = {f"--{name}": getattr(options, name.replace("-", "_")) for name in ("sizes", "repeats", "longest-seconds")}
    place = {"workers on the node": per_node, "device for each": device.type}
    return {**place, **words, "--hosts given": bool(options.hosts)}


def refuse_unlike(found: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """ValueError, the same on all workers, for a host on which something else was started; (host, terms) by rank."""
    first, wanted = found[0]
    for host, terms in found:
        for name, value in terms.items():
            if value != wanted[name]:
                raise ValueError(
                    f"{name}: {value} on {host}, {wanted[name]} on {first}: start equally many workers on each node, "
                    "with a device for each or without, and with the same words"
                )


def unique(names: Sequence[str]) -> list[str]:
    """A name that came before gets its number behind it."""
    return [f"{name}-{i}" if name in names[:i] else name for i, name in enumerate(names)]


def shown(costs: Sequence[Cost]) -> Table:
    """One row a line."""
    table = Table("operation", "reach", "workers", "flows", "latency us", "MB/s", "largest error", title="network")
    for cost in costs:
        numbers = (cost.operation, cost.reach, str(cost.workers), str(cost.flows))
        fitted = f"{1e6 * cost.latency_seconds:.0f}", f"{cost.bytes_per_second / 1e6:,.0f}", f"{100 * cost.error:.0f}%"
        table.add_row(*numbers, *fitted)
    return table


def measured(
    options: argparse.Namespace, size: int, device: torch.device, per_node: int, say: Callable[[str], None]
) -> tuple[list[Cost], Links | None, dict[str, str]]:
    """(lines, links between hosts where asked for, devices by host). Collective."""
    timeout = timedelta(seconds=options.timeout_seconds)
    with world(timeout):
        refuse_unlike(gather_world((platform.node(), terms(options, device, per_node))))
        plan = probes(size, per_node)
        wire = connect(device, timeout, "nccl" if device.type == "cuda" else "gloo")
        meter = Meter(wire, device, options.sizes, options.repeats, options.longest_seconds, say)
        costs = meter.costs(plan)
        leaders = range(0, size, per_node)
        named = gather_objects(wire.flags, (platform.node(), device_name(device)))
        hosts = unique([named[leader][0] for leader in leaders])
        links = files.of(hosts, meter.links(leaders)) if options.hosts and len(hosts) > 1 else None
        return costs, links, {host: named[leader][1] for host, leader in zip(hosts, leaders, strict=True)}


def run(options: argparse.Namespace) -> None:
    """Measure on all; worker 0 shows and writes."""
    rank, size, local_rank, per_node = place(os.environ)
    refuse(options)
    refuse_alone(size)
    profile = read(options.model) if rank == 0 else None  # before all have waited for it
    device = device_of(local_rank, per_node)
    if profile is None:
        measured(options, size, device, per_node, lambda text: None)
        return
    console = Console()
    with console.status("connecting") as status:
        costs, links, hosts = measured(options, size, device, per_node, status.update)
    console.print(shown(costs))
    write(_with(profile, costs, hosts), options.out or options.model)
    console.print(f"wrote {options.out or options.model}")
    if links:
        links.write(options.hosts)
        console.print(f"wrote {options.hosts}: lightning-decentral placement {options.hosts}")


def _with(profile: Profile, costs: Sequence[Cost], hosts: Mapping[str, str]) -> Profile:
    return dataclasses.replace(profile, network=tuple(costs), hosts={**profile.hosts, **hosts})


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    made = argparse.ArgumentParser(prog="lightning_decentral.profile", description=__doc__.partition("\n")[0])
    made.add_argument(
        "--model", default="profile.json", help="what `lightning-decentral profile` wrote; worker 0's file"
    )
    made.add_argument("--out", help="the file to write (default: that one)")
    made.add_argument("--hosts", help="also measure every pair of hosts and write this file for `placement`")
    made.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of the messages, ascending")
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--longest-seconds", type=float, default=0.5, help="no larger message after one that took longer")
    made.add_argument("--timeout-seconds", type=float, default=600.0, help="for a worker that doesn't answer")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    options = parser().parse_args(arguments)
    try:
        run(options)
    except (ValueError, OSError) as error:  # a lost neighbour is an OSError, too
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
