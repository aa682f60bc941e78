"""Interface of one worker's part of a strategy, whichever it is, and the place that the worker has in it.

The parts of `strategies` and `averaging` build on it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule

from lightning_decentral.planner.rehearsal.turns import CPU
from lightning_decentral.shared.nonfinite import Unchecked
from lightning_decentral.shared.wire.averaging.equal_replicas import EqualReplicas
from lightning_decentral.shared.wire.meeting.comparison import unasked
from lightning_decentral.shared.wire.transport import Wire


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
    """One worker's part, in the order in which Lightning's loop comes to it. Every call but `forward` and `backward` is
    collective: all workers, each in a thread of its own.

    Attributes:
        drifts: whether workers differ after an update.
        concurrent: whether it does nothing within a step, so that the steps of several workers may be computed at a
            time.
        check: what the strategy does with an update's gradients before it.
    """

    drifts: ClassVar[bool]
    concurrent: ClassVar[bool] = True
    check: Unchecked = Unchecked()

    @abstractmethod
    def begin(self) -> None:
        """Prepare the first step."""

    def forward(self, step: int, *batch: Any) -> AbstractContextManager[None]:
        """Context around a `training_step` with these arguments."""
        return nullcontext()

    def backward(self) -> None:  # noqa: B027  # most have nothing to prepare
        """Prepare the module's own backward, through all of the graph, or a part of it."""

    @abstractmethod
    def average(self) -> None:
        """.grad <- what the update takes, after the backward; not asked of those that drift."""

    @abstractmethod
    def mix(self) -> None:
        """Send and receive what the strategy does after the update."""

    @abstractmethod
    def release(self) -> None:
        """The parameters are the module's alone again."""

    @property
    @abstractmethod
    def sent_bytes(self) -> float: ...


class ReplicaMember(Member):
    """Worker whose replica stays equal to the others': one update, of averaged gradients, and worker 0's running
    statistics, by the strategies' own `EqualReplicas`."""

    drifts: ClassVar[bool] = False

    def __init__(self, module: LightningModule, place: MemberPlace, check: Unchecked) -> None:
        self._module, self._place, self.check, self._equal = module, place, check, EqualReplicas()

    def begin(self) -> None:
        self._equal.begin(self._module, self._place.wire, unasked, list)

    def mix(self) -> None:
        self._equal.advance(self._module.current_epoch)

    def release(self) -> None:
        self._equal.close()
