"""Frozen parameters in the optimizer: what happens at a step to those that no worker trained (skip, decay, forget)."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer


class Absent(ABC):
    """Called before one optimizer's update with the parameters below the cuts; their `.grad` is None."""

    @abstractmethod
    def settle(self, optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        """Do to them what belongs to this step."""


@dataclass(frozen=True)
class Skip(Absent):
    """x stays, the optimizer's state stays, no weight decay: as if the step weren't there."""

    def settle(self, optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        """torch's optimizers pass over parameters without gradients."""


@dataclass(frozen=True)
class Decay(Absent):
    """x <- (1 - learning rate * weight decay) x, the optimizer's state stays.

    So that the decay of a parameter doesn't depend on how often it is trained. It is what AdamW does to every
    parameter, and what SGD without momentum makes of its L2 term. A step that a loss scaler skips decays all the same.
    """

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
    """x stays, its optimizer state is dropped: memory for what is trained at the moment; moments begin anew later."""

    def settle(self, optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            optimizer.state.pop(parameter, None)


def settle(absent: Absent, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """`.grad` of the parameters becomes None; then what was chosen."""
    for parameter in parameters:  # a user's zero_grad may leave zeros, with which optimizers would update
        parameter.grad = None
    absent.settle(optimizer, parameters)
