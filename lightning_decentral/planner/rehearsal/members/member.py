"""What a crew asks of one worker's part of a strategy, whichever it is, and the place that the worker has in it.

Short, and a module of its own: the parts of `strategies`, `averaging` and `partial` build on it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from lightning_decentral.planner.rehearsal.worker import CPU, Within
from lightning_decentral.shared.wire.transport import Wire


@dataclass(frozen=True)
class Place:
    """One worker among those of this process.

    Args:
        broadcast: hands worker 0's value to all.
        per_node: workers on a node.
        steps: of the whole rehearsal.
        device: where it's computed.
    """

    wire: Wire
    broadcast: Callable[[Any], Any]
    worker: int
    workers: int
    per_node: int
    steps: int
    device: torch.device = CPU


class Member(Within, ABC):
    """One worker's part. Every call but those within a training step is collective: all workers, each in a thread of
    its own.

    Attributes:
        drifts: whether workers differ after an update, which each makes; else one's serves all.
        stacks: whether it does nothing within a step, so that the steps of all workers may be computed at once.
    """

    drifts: ClassVar[bool]
    stacks: ClassVar[bool] = True

    @abstractmethod
    def begin(self) -> None:
        """Before the first step."""

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
