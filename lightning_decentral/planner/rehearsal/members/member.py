"""Interface of one worker's part of a strategy, whichever it is, and the place that the worker has in it.

The parts of `strategies`, `averaging` and `partial` build on it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from lightning.fabric.plugins.precision import Precision
from lightning.pytorch import LightningModule
from torch.optim import Optimizer

from lightning_decentral.shared.updates import Unchecked
from lightning_decentral.shared.wire.running_buffers import RunningBuffers
from lightning_decentral.shared.wire.transport import Wire

CPU = torch.device("cpu")


@dataclass(frozen=True)
class MemberPlace:
    """One worker among those of this process.

    Args:
        broadcast: hands worker 0's value to all.
        meet: returns when all have come.
        in_turn: all workers go on one after the other until the next step, where gradients are computed on threads.
        per_node: workers on a node.
        steps: of the whole rehearsal.
        device: where it's computed.
    """

    wire: Wire
    broadcast: Callable[[Any], Any]
    meet: Callable[[], None]
    in_turn: Callable[[], None]
    worker: int
    workers: int
    per_node: int
    steps: int
    device: torch.device = CPU


class Member(ABC):
    """One worker's part, in the order in which Lightning's loop comes to it. Every call but the two around a step is
    collective: all workers, each in a thread of its own.

    Attributes:
        drifts: whether workers differ after an update.
        apart: whether it does nothing within a step, so that the steps of several workers may be computed at a time.
    """

    drifts: ClassVar[bool]
    apart: ClassVar[bool] = True

    @abstractmethod
    def begin(self) -> None:
        """Before the first step."""

    def forward(self, step: int, *batch: Any) -> AbstractContextManager[None]:
        """Context around a `training_step` with these arguments."""
        return nullcontext()

    def backward(self) -> AbstractContextManager[None]:
        """Context around the module's own backward, through all of the graph, or a part of it."""
        return nullcontext()

    def checked(self, closure: Callable[[], Any], optimizer: Optimizer, precision: Precision) -> Callable[[], Any]:
        """Closure that computes the gradients of an update, and checks them as the strategy does."""
        return closure

    @abstractmethod
    def average(self) -> None:
        """.grad <- what the update takes, after the backward; not asked of those that drift."""

    @abstractmethod
    def mix(self) -> None:
        """After the update."""

    @abstractmethod
    def release(self) -> None:
        """The parameters are the module's alone again."""

    @property
    @abstractmethod
    def sent_bytes(self) -> float: ...


class EqualReplicas(Member):
    """Workers that take one update, of averaged gradients, with worker 0's running statistics for all."""

    drifts: ClassVar[bool] = False

    def __init__(self, module: LightningModule, place: MemberPlace, check: Unchecked) -> None:
        self._module, self._place, self._check, self._epoch = module, place, check, -1

    def begin(self) -> None:
        buffers = self._place.wire.group(None)
        assert buffers is not None
        self._buffers = RunningBuffers(self._module, buffers)

    def checked(self, closure: Callable[[], Any], optimizer: Optimizer, precision: Precision) -> Callable[[], Any]:
        return self._check.after(closure, optimizer, precision)

    def mix(self) -> None:
        # Once an epoch, look which further buffers have changed, as the strategies do.
        look, self._epoch = self._epoch != self._module.current_epoch, self._module.current_epoch
        self._buffers.share(look)
