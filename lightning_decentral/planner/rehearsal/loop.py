"""Additions of a rehearsal to a module: the Trainer's numbers, and learning rates times a factor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from lightning_decentral.planner.rehearsal.turns import CPU

RATES = ("lr", "initial_lr", "max_lr", "min_lr")
"""Entries of a parameter group that are learning rates."""


@dataclass(frozen=True)
class LoopSettings:
    """Settings that a Trainer adds to a module.

    Args:
        clip: its `gradient_clip_val`.
        rate: all learning rates are multiplied by it.
        run_steps: its `max_steps`, which schedules as long as the run ask for; -1: without an end.
        seed: added to that of `seed_everything`.
        device: where all workers are computed.
    """

    clip: float | None = None
    rate: float = 1.0
    run_steps: int = -1
    seed: int = 0
    device: torch.device = CPU


def loss_of(output: Any) -> Tensor:
    """Loss in what a `training_step` returned."""
    loss: Tensor | None = output["loss"] if isinstance(output, Mapping) else output
    if loss is None:
        raise ValueError("training_step gave no loss: a step that is left out can't be rehearsed")
    return loss


def one_of(module: LightningModule, optimizers: Sequence[Optimizer], schedulers: Sequence[Any]) -> Optimizer:
    """The optimizer.

    Raises:
        ValueError: there are several, or none, or a schedule asks for validation.
    """
    if len(optimizers) != 1:
        name = type(module).__name__
        raise ValueError(f"configure_optimizers of {name} gave {len(optimizers)} optimizers: one can be rehearsed")
    if any(one.reduce_on_plateau for one in schedulers):
        raise ValueError("ReduceLROnPlateau asks for validation, which a rehearsal has not: take another schedule")
    return optimizers[0]


def scale(optimizer: Optimizer, schedulers: Sequence[Any], factor: float) -> None:
    """Every learning rate, also those that a schedule begins with, times a factor."""
    for group in optimizer.param_groups:
        group.update({name: group[name] * factor for name in RATES if name in group})
    for scheduler in schedulers:
        inner = getattr(scheduler, "_schedulers", [])
        for one in (scheduler, *inner):
            if "base_lrs" in vars(one):
                one.base_lrs = [rate * factor for rate in one.base_lrs]


class OwnRates:
    """Sees whether anything but schedules sets learning rates, which no factor reaches.

    Raises:
        ValueError: in the step, where they are to be multiplied.
    """

    def __init__(self, module: LightningModule, optimizer: Optimizer, scheduled: bool, factor: float) -> None:
        self._module, self._optimizer = module, optimizer
        self._scheduled, self._factor, self._rates = scheduled, factor, self._now()

    def _now(self) -> list[float]:
        return [float(group.get("lr", 0.0)) for group in self._optimizer.param_groups]

    def begin(self) -> None:
        """A step begins; schedules have set what they set."""
        if self._scheduled:
            self._rates = self._now()

    def check(self) -> None:
        """Before the update."""
        if self._factor != 1 and self._now() != self._rates:
            raise ValueError(
                f"{type(self._module).__name__} sets learning rates by itself, which can't be multiplied by "
                f"{self._factor:g}: give a scheduler in configure_optimizers, or rates=[1]"
            )
