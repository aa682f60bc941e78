"""Replicas that stay equal (compressed all-reduce, partial backprop): what both need in addition to the average itself.

Updates are counted, worker 0's running statistics go to all after each of them, and a change of what is trained is
compared. The same in a Trainer and, for each module, in a loop with Fabric.
"""

from collections.abc import Callable
from typing import Protocol

from torch import nn

from lightning_decentral.shared.wire.meeting.layouts import Alike, Unasked
from lightning_decentral.shared.wire.running_buffers import RunningBuffers
from lightning_decentral.shared.wire.transport import Transport, Wire


class Average(Protocol):
    """Protocol of an average of gradients, which takes a worker's news along."""

    news: Callable[[], bool]
    layouts: Alike

    def heard(self) -> bool:
        """Whether any worker has had news since the last call; the same on all of them."""


class EqualReplicas:
    """Running buffers, the number of updates and the comparison of what is trained, from `begin` to `close`.

    Attributes:
        updates: taken since `begin`; None outside of training, also in the process that started the workers.
    """

    def __init__(self) -> None:
        self.updates: int | None = None
        self._buffers: RunningBuffers | None = None
        self._layouts: Alike = Unasked()
        self._heard: Callable[[], bool] = bool
        self._period = -1

    def begin(self, module: nn.Module, wire: Wire | None) -> None:
        """Collective; without a wire there is a single worker."""
        self.updates, self._period = 0, -1
        self._buffers = None if wire is None else RunningBuffers(module, of_all(wire))

    def compare(self, layouts: Alike) -> None:
        """From now on the other workers are asked where what is trained changes."""
        self._layouts = layouts

    def join(self, average: Average) -> None:
        """Gradients are averaged by this from now on."""
        assert self._buffers is not None
        average.news, average.layouts, self._heard = self._buffers.changed, self._layouts, average.heard

    def leave(self) -> None:
        """The average has ended, another one may come."""
        self._layouts.close()
        self._layouts, self._heard = Unasked(), bool

    def close(self) -> None:
        self.leave()
        self.updates, self._buffers = None, None

    def replaced(self) -> None:
        """The optimizers are others than before. RuntimeError where they aren't on another worker."""
        self._layouts.changed()

    def rounds(self) -> list[int]:
        """Updates taken, as one number; none outside of training."""
        return [] if self.updates is None else [self.updates]

    def advance(self, period: int) -> None:
        """After an update. Collective.

        Args:
            period: where it is another than last time, look which further buffers have changed: comparing all takes
                time.
        """
        assert self.updates is not None
        look, self._period = period != self._period, period
        if self._buffers is not None:
            self._buffers.share(self._heard() or look)
        self.updates += 1  # not before: who waits in `share` waits for this update, not for the next one


def of_all(wire: Wire) -> Transport:
    """A new group of all workers. Collective."""
    made = wire.group(None)
    assert made is not None
    return made
