"""Frozen parameters in the optimizer: what a step does to parameters that no worker trained (skip, decay, forget)."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer


class Absent(ABC):
    """Policy for parameters below the cuts, called before an optimizer's update; their `.grad` is None."""

    @abstractmethod
    def settle(self, optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        """Change these parameters as this step requires."""


@dataclass(frozen=True)
class Skip(Absent):
    """Leave x and its optimizer state unchanged, without weight decay, as if the step didn't happen."""

    def settle(self, optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        """torch's optimizers pass over parameters without gradients."""


@dataclass(frozen=True)
class Decay(Absent):
    """Apply weight decay only: x <- (1 - learning rate * weight decay) x; the optimizer's state doesn't change.

    So a parameter's decay doesn't depend on how often it is trained. AdamW decays every parameter like this, and SGD
    without momentum by its L2 term. A step that a loss scaler skips decays, too."""

    @torch.no_grad()
    def settle(self, optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        absent = set(parameters)
        for group in optimizer.param_groups:
            factor = 1 - float(group["lr"]) * float(group.get("weight_decay", 0.0))
            for parameter in group["params"]:
                if parameter in absent:
                    parameter.mul_(factor)


@dataclass(frozen=True)
class Forget(Absent):
    """Drop the optimizer state and keep x: saves memory; the moments begin anew when x is trained again."""

    def settle(self, optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            optimizer.state.pop(parameter, None)


def settle(absent: Absent, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Set `.grad` of the parameters to None, then apply the policy."""
    for parameter in parameters:  # a user's zero_grad may leave zeros, with which optimizers would update
        parameter.grad = None
    absent.settle(optimizer, parameters)
