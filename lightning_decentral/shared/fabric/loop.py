"""Progress of a user's own loop, as its calls show it: which step this is, which optimizer steps, who else is there."""

from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import nn
from torch.optim import Optimizer

from lightning_decentral.shared.meeting import WorkerGroup
from lightning_decentral.shared.updates import IN_LOOP, Updates
from lightning_decentral.shared.wire.meeting.comparison import Layout, TrainingComparison

if TYPE_CHECKING:
    from lightning_decentral.shared.fabric.strategy import FabricWorkers

LOOK_STEPS = 100
"""Steps between comparisons of all buffers, to find those that change: a user's own loop doesn't report epochs."""


class OptimizerTurns:
    """Updates of one optimizer each, in the order in which they come: those that are set up and step no more have none.

    Attributes:
        begun: whether the last step was the first of a turn.
    """

    def __init__(self) -> None:
        self.begun = False
        self._stepped: set[Optimizer] = set()

    def step(self, optimizer: Optimizer) -> None:
        self.begun = not self._stepped or optimizer in self._stepped
        self._stepped = {optimizer} if self.begun else {*self._stepped, optimizer}


class Accumulates(Protocol):
    """Interface asked of a strategy: gradients that are only accumulated."""

    def accumulating(self, module: nn.Module) -> AbstractContextManager[None]: ...


class Accumulating(_BackwardSyncControl):
    """`fabric.no_backward_sync`, where the module has no wrapper that could be asked."""

    def __init__(self, strategy: Accumulates) -> None:
        self._strategy = strategy

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return self._strategy.accumulating(module) if enabled else nullcontext()


class FabricWorkerGroup(WorkerGroup):
    """Says at which step of the user's loop this worker is."""

    def __init__(self, of: "FabricWorkers", timeout: timedelta) -> None:
        super().__init__(of, timeout)
        self._loop = of
        self._updates: Updates | None = None
        self._set_up: list[object] = []
        self.set_ups = TrainingComparison()
        """Asked where something is set up, in the middle of a loop, too."""

    def phase(self) -> str:
        return f"step {self._loop.rounds()[0] + 1}" if self.ready else "set-up"

    def begin(self) -> None:
        """There is a world."""
        self.ready, self.set_ups = True, self.layouts(self._in_order)

    def setting_up(self, one: object) -> None:
        """A module, or an optimizer. Collective.

        Raises:
            RuntimeError: another worker sets up something else, or goes on without; on all.
        """
        self._set_up.append(one)
        self.set_ups.changed()

    def _in_order(self) -> Layout:
        return {f"set-up {number}": type(one).__name__ for number, one in enumerate(self._set_up)}

    def watch(self) -> None:
        """Watch, until `rest`, that no optimizer steps past the strategy where rounds follow its updates."""
        if self._updates is None and self._loop.drifts:
            self._updates = Updates(self._loop, IN_LOOP)

    def rest(self) -> None:
        """The loop has ended."""
        if self._updates is not None:
            self._updates.close()
        self._updates = None

    @property
    def updating(self) -> AbstractContextManager[Any]:
        self.set_ups.begin()
        return self._updates or nullcontext()
