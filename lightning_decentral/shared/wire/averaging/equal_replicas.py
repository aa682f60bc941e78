"""Replicas that stay equal (compressed all-reduce, partial backprop): what both need in addition to the average itself.

Updates are counted, worker 0's running statistics go to all after each of them, and a change of what is trained is
compared. The same in a Trainer and, for each module, in a loop with Fabric.
"""

from collections.abc import Callable, Sequence

from torch import nn
from torch.optim import Optimizer

from lightning_decentral.shared.wire.gradients import Average
from lightning_decentral.shared.wire.meeting.layouts import Alike, MakeLayouts, Trained, Unasked
from lightning_decentral.shared.wire.running_buffers import RunningBuffers
from lightning_decentral.shared.wire.transport import Transport, Wire

Optimizers = Callable[[], Sequence[Optimizer]]


class EqualReplicas:
    """Running buffers, the number of updates and the comparison of what is trained, from `begin` to `close`.

    Attributes:
        updates: taken since `begin`; None outside of training, also in the process that started the workers.
    """

    def __init__(self) -> None:
        self.updates: int | None = None
        self._buffers: RunningBuffers | None = None
        self._layouts: Alike = Unasked()
        self._average: Average | None = None
        self._period = -1

    def begin(self, module: nn.Module, wire: Wire | None, layouts: MakeLayouts, optimizers: Optimizers) -> None:
        """Collective; without a wire there is a single worker. `optimizers` are those of now, whenever it is called."""
        self.updates, self._period = 0, -1
        self._buffers = None if wire is None else RunningBuffers(module, of_all(wire))
        self._layouts = layouts(Trained(module.named_parameters, optimizers))

    def join(self, average: Average) -> None:
        """Gradients are averaged by this from now on."""
        assert self._buffers is not None
        average.news, average.layouts, self._average = self._buffers.changed, self._layouts, average

    def close(self) -> None:
        self._layouts.close()
        self.updates, self._buffers, self._layouts, self._average = None, None, Unasked(), None

    def replaced(self) -> None:
        """The optimizers are others than before. RuntimeError where they aren't on another worker."""
        self._layouts.changed()

    def rounds(self) -> list[int]:
        """Updates taken, as one number; none outside of training."""
        return [] if self.updates is None else [self.updates]

    def wanted(self) -> list[int]:
        """Updates that the others must take, too, before this worker can go on. From any thread."""
        # In this order: an update that ends meanwhile is then counted once, never twice.
        updates = self.rounds()
        return [n + (self._average is not None and self._average.under_way) for n in updates]

    def advance(self, period: int) -> None:
        """After an update. Collective.

        Args:
            period: another than last time where it's time to look which further buffers have changed.
        """
        assert self.updates is not None
        # Not each time: comparing all takes long.
        look, self._period = period != self._period, period
        if self._buffers is not None:
            self._buffers.share((self._average is not None and self._average.heard()) or look)
        self.updates += 1  # not before: who waits in `share` waits for this update, not for the next one


def of_all(wire: Wire) -> Transport:
    """A new group of all workers. Collective."""
    made = wire.group(None)
    assert made is not None
    return made
