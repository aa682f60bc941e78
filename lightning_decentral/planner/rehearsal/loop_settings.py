"""Settings of a rehearsal's Trainers (clipping, steps, seed, device), and learning rates times a factor.

Separate from the crew, as a plan of jobs needs the settings only."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_decentral.planner.rehearsal.turns import CPU

RATES = ("lr", "initial_lr", "max_lr", "min_lr")  # Entries of a parameter group that are learning rates.


@dataclass(frozen=True)
class LoopSettings:
    """Settings of a rehearsal's Trainers."""

    clip: float | None = None  # the Trainer's `gradient_clip_val`
    rate: float = 1.0  # factor of all learning rates
    run_steps: int = -1  # the Trainer's `max_steps`, for schedules as long as the run; -1: without an end
    seed: int = 0  # number added to the seed of `seed_everything`
    device: torch.device = CPU  # device of all workers


def seed_host(seed: int) -> None:
    """Seed the host's random number generators."""
    for begin in (random.seed, np.random.seed, torch.manual_seed):
        begin(seed)


def loss_of(output: Any) -> Tensor:
    """Return the loss from the result of a `training_step`."""
    loss: Tensor | None = output["loss"] if isinstance(output, Mapping) else output
    if loss is None:
        raise ValueError("training_step gave no loss: a step that is left out can't be rehearsed")
    return loss


def scale(optimizer: Optimizer, schedulers: Sequence[Any], factor: float) -> None:
    """Multiply every learning rate, and the schedulers' initial learning rates, by a factor."""
    for group in optimizer.param_groups:
        group.update({name: group[name] * factor for name in RATES if name in group})
    for scheduler in schedulers:
        inner = getattr(scheduler, "_schedulers", [])
        for one in (scheduler, *inner):
            if "base_lrs" in vars(one):
                one.base_lrs = [rate * factor for rate in one.base_lrs]
