"""Numbers of workers and hosts, and this process's device, in Lightning's environments and in those that place workers.

Lightning counts devices x nodes. An environment may have started other numbers, as Ray does: wherever there was room,
each process with a device to itself. Such an environment creates processes externally, and its ranks are its own.

    strategy.on_host    workers of each host, where the environment has placed them; else None
    LOCAL_WORLD_SIZE    workers of this host, by default the environment's workers over num_nodes
    ACCELERATE_TORCH_DEVICE    this process's device, by default its only one, else that of its local rank"""

import os
from typing import Any

import torch


def own_device(strategy: Any) -> torch.device:
    """Return this process's device. ValueError: the strategy has too few devices."""
    devices = strategy.parallel_devices or []
    place = strategy.local_rank if strategy.on_host is None or len(devices) > 1 else 0
    if not 0 <= place < len(devices):
        raise ValueError(
            f"this process has local rank {place} (LOCAL_RANK, or SLURM_LOCALID under SLURM) and was given "
            f"devices={len(devices)}: start as many processes as devices on each host, with local ranks from 0"
        )
    device: torch.device = devices[place]
    return device


def workers_of_host(strategy: Any) -> int:
    return int(strategy.on_host or len(strategy.parallel_devices or ()))


def take_placement(strategy: Any) -> None:
    """Read the environment's numbers, after the launcher was given the Trainer's, which the environment checks."""
    environment, devices, workers = strategy.cluster_environment, strategy.parallel_devices or [], strategy.world_size
    if strategy._start_method != "popen" or not environment.creates_processes_externally:
        return
    on_host = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or max(1, workers // strategy.num_nodes)
    if (on_host, workers) == (len(devices), len(devices) * strategy.num_nodes):
        return
    own = torch.device(os.environ.get("ACCELERATE_TORCH_DEVICE", "meta"))
    if devices and own.type == devices[0].type:
        strategy.parallel_devices = [own]
    _count(strategy, on_host if workers % on_host == 0 else 1)


def adapt(strategy: Any) -> None:
    """Adapt the method to Lightning's numbers, where the environment hasn't placed the workers."""
    if strategy.on_host is None:
        strategy.place_on_hosts()


def _count(strategy: Any, on_host: int) -> None:
    strategy.num_nodes, strategy.on_host = strategy.world_size // on_host, on_host


def shared_layout(strategy: Any) -> tuple[int, int]:
    """Return (hosts, workers of each), equal on all workers when they meet, also where placed hosts differ."""
    placed = strategy.on_host is not None
    return (strategy.world_size, 1) if placed else (strategy.num_nodes, strategy.num_processes)


def in_order(strategy: Any) -> bool:
    """Return whether this process's ranks are those of hosts in order, each with as many workers as its own."""
    on_host = strategy.on_host
    return on_host is None or strategy.global_rank == strategy.node_rank * on_host + strategy.local_rank


def arrive(strategy: Any, in_order: bool) -> None:
    """Finish the placement, once all workers have met. `in_order`: of all; else each worker counts as a host."""
    if strategy.on_host is not None:
        _count(strategy, strategy.on_host if in_order else 1)
        strategy.place_on_hosts()
