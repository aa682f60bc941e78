"""JigSaw carried out (`hydra.launcher.policy=jigsaw`): jobs of several workers share devices, iteration by iteration.

Every member trains by partial backprop with a worker on each device. `plan.gang_arbiter` decides who computes where,
`pieces` asks it in each worker."""

import os
from collections.abc import Sequence
from contextlib import suppress
from statistics import mean

from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_decentral.shared.compute import cuda
from lightning_decentral.sweep.launcher import Carrier, Devices, Ended, slots
from lightning_decentral.sweep.member import SweepMember
from lightning_decentral.sweep.pieces import refusal
from lightning_decentral.sweep.plan.gang_arbiter import GangArbiter
from lightning_decentral.sweep.plan.policy import Scoreboard
from lightning_decentral.sweep.server import Starts

SEGMENTS, STEPS = 12, 24  # that a forecast looks at


class JigSaw(Carrier):
    """Carries out members that all train on all devices, each worker piece by piece."""

    def __init__(self, devices: Devices, memory_bytes: int | None, policy: object, quantum_seconds: float) -> None:
        self.devices, self.title = slots(devices, cuda.device_count()), "JigSaw, piece by piece"
        self.width = len(self.devices)
        if self.width < 2:
            raise ValueError("hydra.launcher.policy=jigsaw needs 2 or more devices: set hydra.launcher.devices=2")
        if memory_bytes is not None:
            raise ValueError(
                f"hydra.launcher.memory_bytes={memory_bytes}: under jigsaw all members alive stay on their devices: "
                "leave it out, and lower hydra.launcher.alive_per_device"
            )

    def refuse(self, members: Sequence[SweepMember]) -> None:
        refuse(members, self.width)

    def run(self, members: Sequence[SweepMember], starts: Starts, alive_per_device: int, scores: Scoreboard) -> Ended:
        given = {member.name: seconds for member in members if (seconds := forecast(member.config, self.width))}
        self.arbiter = GangArbiter(self.devices, given, cores=cores_of(self.devices))
        return super().run(members, starts, alive_per_device, scores)


def refuse(members: Sequence[SweepMember], size: int) -> None:
    """Raise ValueError for a member that has no worker of partial backprop on each device, as far as is known."""
    for member in members:
        strategy = "its strategy"
        with suppress(OmegaConfBaseException):
            strategy = str(OmegaConf.select(member.config, "strategy._target_") or strategy).rpartition(".")[2]
        if member.width != size or strategy not in ("its strategy", "PartialBackpropStrategy"):
            raise ValueError(refusal(member.name, strategy, member.width, size))


def forecast(config: DictConfig, size: int) -> list[float]:
    """Forecast the pieces of a job's workers by the trained fraction of the network and the share of the batch:

        size share (1 + 2 depth) forwards

    Empty for a configuration without `strategy.depth`."""
    with suppress(OmegaConfBaseException, HydraException):
        if (node := OmegaConf.select(config, "strategy.depth")) is not None:
            depth = instantiate(node)
            trained = [mean(depth.after(rank, size, at, SEGMENTS) for at in range(STEPS)) for rank in range(size)]
            return [size * depth.share(rank, size) * (1 + 2 * own / SEGMENTS) for rank, own in enumerate(trained)]
    return []


def cores_of(devices: Sequence[str]) -> dict[str, list[int]]:
    """Divide this process's cores among the devices of the processor; empty where processes can't stay on cores."""
    with suppress(AttributeError):  # on macOS
        cores = sorted(os.sched_getaffinity(0))
        each = max(1, len(cores) // len(devices))
        starts = {device: number * each % len(cores) for number, device in enumerate(devices) if "cpu" in device}
        return {device: cores[start : start + each] for device, start in starts.items()}
    return {}
