"""Optimizer update, on the host or streamed to the device: parameters, gradients and state live on the host."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from lightning_decentral.spilled.compute.streamed_update import StreamedUpdate, refuse_joint
from lightning_decentral.spilled.compute.transfer import OffloadDevice

Updating = Callable[[Optimizer, Mapping[str, Tensor]], AbstractContextManager[None]]
"""Context manager around an optimizer's step, given the module's parameters by name."""


class Update(ABC):
    """A place for the update."""

    @abstractmethod
    def refuse(self, optimizer: Optimizer) -> None:
        """ValueError for one whose update can't run there."""

    @abstractmethod
    def begin(self, device: OffloadDevice, budget_bytes: int) -> Updating:
        """Return what makes the updates of one run."""


@dataclass(frozen=True)
class OnHost(Update):
    """Update on the host: any optimizer, all parameters at once, at the speed of the host's memory."""

    def refuse(self, optimizer: Optimizer) -> None:
        """Accept every optimizer."""

    def begin(self, device: OffloadDevice, budget_bytes: int) -> Updating:
        return lambda optimizer, named: nullcontext()


@dataclass(frozen=True)
class OnDevice(Update):
    """Update on the device, as many parameters at a time as fit, with their gradients and state: for optimizers that
    update each parameter by itself."""

    def refuse(self, optimizer: Optimizer) -> None:
        refuse_joint(optimizer)

    def begin(self, device: OffloadDevice, budget_bytes: int) -> Updating:
        return StreamedUpdate(device, budget_bytes).around
