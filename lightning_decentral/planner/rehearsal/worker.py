"""One worker of a rehearsal: module, optimizer, schedule, batches and random numbers, as Lightning's loop uses them.

Callbacks and a trainer there are none: `global_rank` and `global_step` are 0, and `self.log` says nothing.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import _configure_optimizers, _configure_schedulers_automatic_opt
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_decentral.optim.joined import JoinedUpdate
from lightning_decentral.shared.compute import cuda

RATES = ("lr", "initial_lr", "max_lr", "min_lr")
"""Entries of a parameter group that are learning rates."""
CPU = torch.device("cpu")
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@dataclass(frozen=True)
class Loop:
    """What a Trainer adds to a module.

    Args:
        clip: its `gradient_clip_val`.
        rate: all learning rates are multiplied by it.
        epoch_steps: after which schedulers of epochs step; None: never.
        run_steps: what `trainer.estimated_stepping_batches` says, for schedules as long as the run.
        seed: added to that of `seed_everything`.
        device: where all workers are computed.
    """

    clip: float | None = None
    rate: float = 1.0
    epoch_steps: int | None = None
    run_steps: int = -1
    seed: int = 0
    device: torch.device = CPU


class Within:
    """What a strategy does within a training step: nothing, where it doesn't say."""

    def forward(self, batch: Any, step: int) -> AbstractContextManager[None]:
        """Around the forward on this batch; worker 0 comes first."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Through all of the graph, or a part of it."""
        loss.backward()


class RandomNumbers:
    """A worker's own within, the process's behind it; within themselves they cost nothing."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self._device, self._own, self._depth = device, seeded(device, seed), 0
        self._before: list[Tensor] = []

    def __enter__(self) -> None:
        if not self._depth:
            self._before = random_states(self._device)
            set_random_states(self._own, self._device)
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._own = random_states(self._device)
            set_random_states(self._before, self._device)


class Worker:
    """Updates its own module.

    Attributes:
        random: numbers that it draws; who calls several of its methods one after the other does it within.

    Raises:
        ValueError: manual optimization, several optimizers, or a schedule that asks for validation.
    """

    def __init__(self, module: LightningModule, batches: Iterator[Any], loop: Loop) -> None:
        if not module.automatic_optimization:
            raise ValueError(f"{type(module).__name__} optimizes by hand: only automatic optimization can be rehearsed")
        self.module, self._batches, self._loop = quiet(module).train().to(loop.device), batches, loop
        self.optimizer, self._schedulers = configured(module, loop.run_steps)
        scale(self.optimizer, [s.scheduler for s in self._schedulers], loop.rate)
        self._update = JoinedUpdate(self.optimizer)
        self.random, self._count = RandomNumbers(loop.device, loop.seed), 0

    def batch(self) -> Any:
        """The next one, by this worker's random numbers."""
        with self.random:
            batch = next(self._batches, None)
        if batch is None:
            raise ValueError(f"a worker has {self._count} batches only: rehearse fewer steps")
        self._count += 1
        return moved(self.module, batch, self._loop.device)

    @property
    def index(self) -> int:
        """Of the batch that it got last."""
        return self._count - 1

    def gradients(self, batch: Any, within: Within) -> Tensor:
        """Those of the batch that it got last, by its random numbers; its loss before the update."""
        with self.random:
            with within.forward(batch, self.index):
                loss = loss_of(self.module.training_step(batch, self.index))
            self.optimizer.zero_grad()
            within.backward(loss)
        return torch.as_tensor(loss.detach()).double()

    def share(self, other: nn.Module) -> None:
        """Its parameters are the other's from now on, in one memory; the gradients stay its own."""
        for own, theirs in zip(self.module.parameters(), other.parameters(), strict=True):
            own.data = theirs.data

    def update(self) -> None:
        """By the gradients that are there."""
        with self.random:
            self._update.step(self._loop.clip)

    def schedule(self) -> None:
        """After the round: it mixes at the rate of the update."""
        self._advance("step", self._count)
        each = self._loop.epoch_steps
        if each and self._count % each == 0:
            self._advance("epoch", self._count // each)

    def _advance(self, interval: str, times: int) -> None:
        for found in self._schedulers:
            if found.interval == interval and times % found.frequency == 0:
                self.module.lr_scheduler_step(found.scheduler, None)


Module = TypeVar("Module", bound=LightningModule)


def quiet(module: Module) -> Module:
    """Whose `self.log` says nothing: without a trainer it would warn at every step."""
    module.__dict__["log"] = lambda *_, **__: None
    return module


def loss_of(output: Any) -> Tensor:
    """In what a `training_step` returned."""
    loss: Tensor | None = output["loss"] if isinstance(output, Mapping) else output
    if loss is None:
        raise ValueError("training_step gave no loss: a step that is left out can't be rehearsed")
    return loss


def random_states(device: torch.device) -> list[Tensor]:
    """Of the host's generator, and of the device's where that is another."""
    return [torch.get_rng_state(), *([cuda.random_state(device)] if device.type == "cuda" else [])]


def set_random_states(states: list[Tensor], device: torch.device) -> None:
    """Go on drawing where `random_states` was taken."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        cuda.set_random_state(state, device)


def seeded(device: torch.device, seed: int = 0) -> list[Tensor]:
    """The random states that a worker begins with: by the seed of `seed_everything`, if there was one."""
    before = random_states(device)
    if seed or "PL_GLOBAL_SEED" in os.environ:
        torch.manual_seed(int(os.environ.get("PL_GLOBAL_SEED", "0")) + seed)
    found = random_states(device)
    set_random_states(before, device)
    return found


def moved(module: LightningModule, batch: Any, device: torch.device) -> Any:
    """The batch on the device, as the module moves it."""
    return batch if device.type == "cpu" else module.transfer_batch_to_device(batch, device, 0)


def configured(module: LightningModule, run_steps: int = -1) -> tuple[Optimizer, list[Any]]:
    """The optimizer, and its schedules as Lightning reads them, of a run of so many steps (-1: without an end)."""
    module.trainer = _trainer(run_steps)
    try:
        asked: Any = module.configure_optimizers()
        optimizers, schedulers, monitor = _configure_optimizers(asked)
    finally:
        module.trainer = None
    if len(optimizers) != 1:
        raise ValueError(f"configure_optimizers gave {len(optimizers)} optimizers: modules with one can be rehearsed")
    found = _configure_schedulers_automatic_opt(schedulers, monitor)
    if any(one.reduce_on_plateau for one in found):
        raise ValueError("ReduceLROnPlateau asks for validation, which a rehearsal has not: take another schedule")
    return optimizers[0], found


@lru_cache(maxsize=1)  # of all workers: only its number of steps is read
def _trainer(run_steps: int) -> Trainer:
    said = logging.getLogger("lightning.pytorch")
    level = said.level
    said.setLevel(logging.ERROR)  # which devices there are
    try:
        return Trainer(max_epochs=-1, max_steps=run_steps, **QUIET)
    finally:
        said.setLevel(level)


def scale(optimizer: Optimizer, schedulers: list[Any], factor: float) -> None:
    """Every learning rate, also those that a schedule begins with, times a factor."""
    for group in optimizer.param_groups:
        group.update({name: group[name] * factor for name in RATES if name in group})
    for scheduler in schedulers:
        inner = getattr(scheduler, "_schedulers", [])
        for one in (scheduler, *inner):
            if "base_lrs" in vars(one):
                one.base_lrs = [rate * factor for rate in one.base_lrs]
