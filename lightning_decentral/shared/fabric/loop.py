"""Follows a user's Fabric loop by the calls it makes: counts steps, compares set-ups, watches optimizer steps."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import nn

from lightning_decentral.shared.introduction import show
from lightning_decentral.shared.meeting import WorkerGroup
from lightning_decentral.shared.updates import IN_LOOP, Updates
from lightning_decentral.shared.wire.meeting.comparison import TrainingComparison

if TYPE_CHECKING:
    import lightning_decentral.shared.fabric.strategy as fabric

LOOK_STEPS = 100
"""Steps between comparisons of all buffers, to find those that change: a user's own loop doesn't report epochs."""


class Accumulating(_BackwardSyncControl):
    """Serves `fabric.no_backward_sync` (gradient accumulation) for a module without a wrapper."""

    def __init__(self, accumulating: Callable[[nn.Module], AbstractContextManager[None]]) -> None:
        self._accumulating = accumulating

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return self._accumulating(module) if enabled else nullcontext()


class FabricWorkerGroup(WorkerGroup):
    """Connects the workers of a user's Fabric loop, and knows at which step of the loop this worker is."""

    def __init__(self, strategy: "fabric.FabricWorkers", timeout: timedelta) -> None:
        super().__init__(strategy, timeout)
        self._loop = strategy
        self._updates: Updates | None = None
        self._introduced = False
        self._set_up: list[object] = []
        self.set_ups = TrainingComparison()  # a function: something may be set up in the middle of a loop, too

    def phase(self) -> str:
        return f"step {self._loop.rounds()[0] + 1}" if self.ready else "set-up"

    def begin(self) -> None:
        """Begin comparing set-ups, once the process group exists."""
        in_order = lambda: {f"set-up {number}": type(one).__name__ for number, one in enumerate(self._set_up)}  # noqa: E731
        self.ready, self.set_ups = True, self.layouts(in_order)

    def setting_up(self, one: object) -> None:
        """Compare the module or optimizer that is set up. Collective. RuntimeError, on all workers: another worker sets
        up something else, or trains on without."""
        self._set_up.append(one)
        self.set_ups.changed()

    def watch(self) -> None:
        """Watch, until `rest`, that no optimizer steps past the strategy where rounds follow its updates."""
        if self._updates is None and self._loop.drifts:
            self._updates = Updates(self._loop, IN_LOOP)

    def rest(self) -> None:
        """Stop watching optimizers: the loop has ended."""
        if self._updates is not None:
            self._updates.close()
        self._updates = None

    @property
    def updating(self) -> AbstractContextManager[Any]:
        self.set_ups.begin()
        if self.ready and not self._introduced:
            self._introduced = True
            show(self._loop.introduction())
        return self._updates or nullcontext()
