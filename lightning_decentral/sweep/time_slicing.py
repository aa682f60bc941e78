"""Time slicing: a callback that returns the device of a sweep's member between two batches and waits for it again.

Lightning adds the callback to every Trainer of a member's process, through its entry points
(`lightning.pytorch.callbacks_factory`). If a policy compares members, `Scoring` is added, too, and sends each
validation's score."""

import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_decentral.shared.compute import cuda
from lightning_decentral.sweep.eviction import Residence
from lightning_decentral.sweep.plan.arbiter import TurnReport
from lightning_decentral.sweep.plan.policy import Score
from lightning_decentral.sweep.wire.client import Admission, Seat
from lightning_decentral.sweep.wire.own_clock import standing_still

# A member that waits longer than this for data between batches lends its device to others meanwhile.
IDLE_SECONDS = 0.005

_SEATS: dict[int, Seat] = {}


class Gate(Callback):
    """Takes the device before a batch; returns it after a quantum, at the end of each loop and while data are awaited,
    measured by `clock` in seconds.

    ValueError: the trainer starts more workers than devices were granted, or the module needs more memory than its
    device has."""

    def __init__(self, admission: Admission, clock: Callable[[], float] = time.perf_counter) -> None:
        self._admission, self._clock = admission, clock
        self._residence: Residence | None = None
        self._trainer: Trainer | None = None
        self._total = math.inf
        self._first = (0, 0.0)
        self._peak_bytes = 0
        self._batch_end = math.inf
        self._gap_seconds = 0.0
        self._met = False

    # What the seat asks of it.

    def leave(self) -> None:
        self._residence = self._of_training()  # anew: gradients and optimizer state appear and disappear
        self._residence.leave()

    def enter(self) -> None:
        if self._residence is not None:
            self._residence.enter()
        self._residence = None

    def ends(self, score: Score) -> bool:
        """Return whether the scheduler ends the training for this score; called by the member's worker 0."""
        return self._seat.ends(score)

    # What Lightning calls.

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        granted = self._admission.width
        if trainer.world_size > granted:
            raise ValueError(
                f"trainer.devices={trainer.world_size} is larger than the {granted} device(s) granted to this member: "
                "a sweep reads a number or a list at trainer.devices of the configuration: set it there, or use "
                f"{granted}"
            )
        self._trainer = trainer
        self._peak_bytes = 0
        if self._device.type == "cuda":
            memory = self._admission.memory_bytes
            if memory is not None and memory < cuda.total_bytes(self._device):
                cuda.limit_bytes(memory, self._device)  # the allocator refuses memory that the arbiter doesn't count
            self._take()  # now: the module moves to the device next
        elif self._admission.threads and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(self._admission.threads)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._meet()
        try:
            self._total = float(trainer.estimated_stepping_batches)
        except MisconfigurationException:  # accumulation that changes between epochs
            self._total = math.inf
        self._first = (trainer.global_step, self._seat.worked_seconds if trainer.global_rank == 0 else 0.0)
        if self._admission.memory_bytes is not None:
            trained = [p for p in pl_module.parameters() if p.requires_grad]
            gradients = sum(p.numel() * p.element_size() for p in trained)
            self._refuse_beyond(self._of_training().kept_bytes + gradients)

    def on_train_batch_start(self, *_: Any) -> None:
        gap = max(0.0, self._clock() - self._batch_end)
        # A running mean: one late batch alone doesn't lend the device.
        self._gap_seconds += 0.2 * (gap - self._gap_seconds)
        self._take()

    def on_train_batch_end(self, *_: Any) -> None:
        if self._admission.memory_bytes is not None and self._active.global_step <= self._first[0] + 1:
            self._measure()  # gradients with optimizer state; a validation, for example, frees gradients
        if self._gap_seconds > IDLE_SECONDS:
            self._give()
        self._batch_end = self._clock()

    def on_validation_start(self, *_: Any, **__: Any) -> None:
        self._meet()

    on_test_start = on_predict_start = on_validation_start

    def on_validation_batch_start(self, *_: Any, **__: Any) -> None:
        self._take()

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def on_train_epoch_end(self, *_: Any, **__: Any) -> None:
        """Return the device: checkpoints and logs between loops need none."""
        self._batch_end = math.inf
        self._give()

    on_validation_end = on_test_end = on_predict_end = on_train_end = on_train_epoch_end

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, torch.OutOfMemoryError) and self._admission.memory_bytes is not None:
            self._refuse_beyond(self._measured_bytes(), exception)
        self._leave_for_good()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._leave_for_good()  # Lightning has taken the module off the device

    # How.

    @property
    def _active(self) -> Trainer:
        assert self._trainer is not None, "no Trainer has called setup"
        return self._trainer

    @property
    def _device(self) -> torch.device:
        return self._active.strategy.root_device

    @property
    def _seat(self) -> Seat:
        """Seat of this process, whichever of its Trainers asks; forked workers have their own."""
        if os.getpid() not in _SEATS:  # a fork has the dictionary, but its parent's seat in it
            _SEATS[os.getpid()] = Seat(self._admission, self)
        seat = _SEATS[os.getpid()]
        seat.baggage = self
        return seat

    def _meet(self) -> None:
        """Wait with worker 0, once, on the other workers of a member with several devices: their clocks stop, too."""
        if self._admission.width > 1 and not self._met:
            with standing_still():
                self._take()
                self._active.strategy.barrier("turn")
            self._met = True

    def _take(self) -> None:
        if self._active.global_rank == 0 and not self._seat.fresh:
            self._seat.take(self._turn() if self._seat.held else TurnReport())

    def _give(self) -> None:
        """Give the device back; a member with several devices keeps them, as its workers would wait for each other."""
        if self._active.global_rank == 0 and self._admission.width == 1 and self._seat.held:
            self._seat.give(self._turn())

    def _leave_for_good(self) -> None:
        self._met = False
        if self._trainer is not None and os.getpid() in _SEATS:
            with suppress(OSError):  # the sweep itself may have ended
                self._seat.give(TurnReport(*self._progress()))
                self._seat.vacate()

    def _turn(self) -> TurnReport:
        """Report progress, remaining seconds and memory at the end of a grant."""
        if self._device.type == "cuda":  # a grant ends when the device has finished its work
            cuda.synchronize(self._device)
        progress, remaining = self._progress()
        if self._admission.memory_bytes is None:
            return TurnReport(progress, remaining)
        self._measure()
        # Before the first update gradients and optimizer state can't be seen yet.
        seen = self._active.state.fn != "fit" or self._active.global_step > self._first[0]
        return TurnReport(progress, remaining, self._peak_bytes if seen else None, self._of_training().kept_bytes)

    def _progress(self) -> tuple[float | None, float | None]:
        """Return (steps / all steps, seconds so far * steps to go / steps so far), in optimizer steps of this fit."""
        if self._active.state.fn != "fit":
            return 1.0, 0.0
        step, (first, seconds) = self._active.global_step, self._first
        if not 0 < self._total < math.inf:
            return None, None
        progress = min(1.0, step / self._total)
        if step <= first:
            return progress, None
        return progress, (self._seat.worked_seconds - seconds) * max(0.0, self._total - step) / (step - first)

    def _of_training(self) -> Residence:
        return Residence(self._active.lightning_module, self._active.optimizers, self._device)

    def _measured_bytes(self) -> int:
        """Peak of the CUDA allocator; on a CPU, bytes of parameters, gradients and optimizer state."""
        if self._device.type == "cuda":
            return cuda.peak_reserved_bytes(self._device)
        return self._of_training().kept_bytes

    def _measure(self) -> None:
        self._peak_bytes = max(self._peak_bytes, self._measured_bytes())
        self._refuse_beyond(self._peak_bytes)

    def _refuse_beyond(self, needed_bytes: int, out_of_memory: BaseException | None = None) -> None:
        memory = self._admission.memory_bytes
        if memory is not None and (out_of_memory is not None or needed_bytes > memory):
            raise ValueError(
                f"this member needs at least {needed_bytes:,} bytes on its device, more than any device of the sweep "
                f"has (hydra.launcher.memory_bytes={memory}): train with strategy=spilled, or raise memory_bytes"
            ) from out_of_memory


class Scoring(Callback):
    """Callback that reports validation scores through a gate's seat and ends fits early, on all workers of a member.

    Metric and mode are those of `policy.Watched`. ValueError: in the fit, if the metric isn't logged."""

    def __init__(self, gate: Gate, metric: str | None, mode: str | None) -> None:
        self._gate, self._metric, self._mode = gate, metric, mode

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        metric, mode = self._watched(trainer)  # on all workers: a missing metric is an error on all
        if metric not in trainer.callback_metrics:
            known = ", ".join(map(str, trainer.callback_metrics)) or "nothing"
            raise ValueError(
                f"hydra.launcher.policy.metric={metric} was not logged when a validation ended ({known}): "
                "log it in validation_step, or name another metric"
            )
        score = Score(metric, mode, trainer.global_step, float(trainer.callback_metrics[metric]))
        ends = trainer.global_rank == 0 and self._gate.ends(score)
        if trainer.strategy.reduce_boolean_decision(ends, all=False):
            trainer.should_stop = True

    def _watched(self, trainer: Trainer) -> tuple[str, str]:
        if self._metric is not None:
            return self._metric, self._mode or "min"
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.monitor is not None:
                return callback.monitor, self._mode or callback.mode
        raise ValueError(
            "this sweep's policy compares a logged metric, but no ModelCheckpoint monitors one: name a metric with "
            "hydra.launcher.policy.metric=val_loss"
        )
