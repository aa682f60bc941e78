"""Piece by piece: each worker of a job takes its device for a forward and backward, as `plan.gang_arbiter` decides."""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_decentral.shared.compute.device import Turn
from lightning_decentral.sweep.plan.arbiter import TurnReport
from lightning_decentral.sweep.time_slicing import Gate


class PieceGate(Gate, Turn):
    """Takes a worker's device before each forward, and returns it after the backward; for an evaluation as a whole.

    ValueError: another strategy than partial backprop, or another number of workers than of devices."""

    _evaluates = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        width, job = self._admission.width, self._admission.member.partition("/")[0]
        match trainer.strategy:
            case object(member=object(turn=Turn()) as steps) if trainer.world_size == width:
                steps.turn = self
            case strategy if stage == "fit":
                raise ValueError(refusal(job, type(strategy).__name__, trainer.world_size, width))
        super().setup(trainer, pl_module, stage)
        self._alone = trainer.world_size < width  # an evaluation, which nobody waits for
        self._admission = replace(self._admission, member=f"{job}/{trainer.global_rank}")
        assert not self._seat.held  # it has connected: from now on a worker that ends without a message is noticed

    def take(self) -> None:
        self.give()  # after a step without a loss, which had no backward
        self._seat.take(TurnReport())
        pin((self._admission.cores or {}).get(self._seat.device or "", ()))
        self._began = time.perf_counter()

    def give(self) -> None:
        if self._seat.held:
            report = self._turn()  # the device has finished its work
            piece = None if self._evaluates else time.perf_counter() - self._began
            self._seat.give(TurnReport(report.progress, piece_seconds=piece))

    def on_validation_start(self, *_: Any, **__: Any) -> None:
        self._evaluates = True
        if not self._alone:
            self.take()

    on_test_start = on_predict_start = on_validation_start

    def _meet(self) -> None:
        """Each worker asks for itself."""

    def _take(self) -> None:
        """Turns begin with steps (`take`)."""

    def _give(self) -> None:
        self.give()
        self._evaluates = False


def refusal(member: str, strategy: str, size: int, devices: int) -> str:
    """Say why a member can't be carried out piece by piece."""
    return (
        f"member {member} trains by {strategy} on {size} device{'s' * (size > 1)}, but under jigsaw each job has a "
        f"worker of partial backprop on each of the sweep's {devices} devices: use strategy=partial_backprop "
        f"trainer.devices={devices}"
    )


def pin(cores: Sequence[int]) -> None:
    """Keep all threads of this process on these cores, if there are any."""
    for thread in os.listdir("/proc/self/task") if cores else ():
        with suppress(OSError):  # it has ended
            os.sched_setaffinity(int(thread), cores)
