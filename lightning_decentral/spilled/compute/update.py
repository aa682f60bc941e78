"""Optimizer update, on the host or streamed to the device: parameters, gradients and state live on the host."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from lightning_decentral.spilled.compute.streamed_update import Travelling, refuse_joint
from lightning_decentral.spilled.compute.transfer import Device


class Updating(Protocol):
    """The updates of one run."""

    def taking(self, optimizer: Optimizer, named: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Context manager around the optimizer's step.

        Args:
            named: the module's parameters.
        """


class Update(ABC):
    """A place for the update."""

    @abstractmethod
    def refuse(self, optimizer: Optimizer) -> None:
        """ValueError for one whose update can't run there."""

    @abstractmethod
    def begin(self, device: Device, budget_bytes: int) -> Updating:
        """Return the object that makes the updates of one run."""


class _Here:
    def taking(self, optimizer: Optimizer, named: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass(frozen=True)
class OnHost(Update):
    """Update on the host: any optimizer, all parameters at once, at the speed of the host's memory."""

    def refuse(self, optimizer: Optimizer) -> None:
        """Accept every optimizer."""

    def begin(self, device: Device, budget_bytes: int) -> Updating:
        return _Here()


@dataclass(frozen=True)
class OnDevice(Update):
    """Update on the device, as many parameters at a time as fit, with their gradients and state: for optimizers that
    update each parameter by itself."""

    def refuse(self, optimizer: Optimizer) -> None:
        refuse_joint(optimizer)

    def begin(self, device: Device, budget_bytes: int) -> Updating:
        return Travelling(device, budget_bytes)
