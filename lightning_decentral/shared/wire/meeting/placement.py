"""Numbers of workers and hosts, and this process's device, in Lightning's environments and in those that place workers.

Lightning counts devices x nodes. An environment may have started other numbers, as Ray does: wherever there was room,
each process with a device to itself. Such an environment creates processes externally, and its ranks are its own."""

import os
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    Strategy = Any  # DDPStrategy of Trainers or of Fabric, behind this class in the order of bases
else:
    Strategy = object


class Placed(Strategy):  # type: ignore[misc]
    """Takes workers, hosts and the device as the environment has placed them, where it started other processes than one
    for each of the Trainer's devices. LOCAL_WORLD_SIZE: workers of this host, by default the environment's workers over
    num_nodes. ACCELERATE_TORCH_DEVICE: this process's device, by default its only one, else that of its local rank."""

    on_host: int | None = None  # workers of each host, where the environment has placed them

    @property
    def root_device(self) -> torch.device:
        devices = self.parallel_devices or []
        place = self.local_rank if self.on_host is None or len(devices) > 1 else 0
        if not 0 <= place < len(devices):
            raise ValueError(
                f"this process has local rank {place} (LOCAL_RANK, or SLURM_LOCALID under SLURM) and was given "
                f"devices={len(devices)}: start as many processes as devices on each host, with local ranks from 0"
            )
        device: torch.device = devices[place]
        return device

    @property
    def num_processes(self) -> int:
        return self.on_host or len(self.parallel_devices or ())

    def place_on_hosts(self) -> None:
        """Adapt the method to the numbers of workers and hosts. ValueError: it can't serve them."""

    def take_placement(self) -> None:
        """Read the environment's numbers, after the launcher was given the Trainer's, which the environment checks."""
        strategy: Any = self
        environment, devices, workers = self.cluster_environment, self.parallel_devices or [], self.world_size
        if self._start_method != "popen" or not environment.creates_processes_externally:
            return
        on_host = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or max(1, workers // self.num_nodes)
        if (on_host, workers) == (len(devices), len(devices) * self.num_nodes):
            return
        own = torch.device(os.environ.get("ACCELERATE_TORCH_DEVICE", "meta"))
        if devices and own.type == devices[0].type:
            strategy.parallel_devices = [own]
        self._count(on_host if workers % on_host == 0 else 1)

    def _count(self, on_host: int) -> None:
        strategy: Any = self
        strategy.num_nodes, self.on_host = self.world_size // on_host, on_host

    def setup_environment(self) -> None:
        if self.on_host is None:
            self.place_on_hosts()  # before any worker communicates
        super().setup_environment()

    @property
    def shared_layout(self) -> tuple[int, int]:
        """Return (hosts, workers of each), equal on all workers when they meet, also where placed hosts differ."""
        return (self.num_nodes, self.num_processes) if self.on_host is None else (self.world_size, 1)

    @property
    def in_order(self) -> bool:
        """Return whether this process's ranks are those of hosts in order, each with as many workers as its own."""
        return self.on_host is None or self.global_rank == self.node_rank * self.on_host + self.local_rank

    def arrive(self, in_order: bool) -> None:
        """Finish the placement, once all workers have met. `in_order`: of all; else each worker counts as a host."""
        if self.on_host is not None:
            self._count(self.on_host if in_order else 1)
            self.place_on_hosts()
