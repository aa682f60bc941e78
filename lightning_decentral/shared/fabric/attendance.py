"""A worker's place among the others, in a loop that states itself where it is.

Short, and a module of its own: everything else of Fabric's binding is about the loop, this about who is there.
"""

from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Protocol

from lightning_decentral.shared.meeting import Attendance, Attending
from lightning_decentral.shared.updates import IN_LOOP, Trained, Updates
from lightning_decentral.shared.wire.meeting.comparison import Alike, Layout, Unasked


class Looping(Attending, Trained, Protocol):
    """Interface asked of a strategy whose loop is the user's."""

    def rounds(self) -> list[int]: ...


class FabricAttendance(Attendance):
    """Says at which step of the user's loop this worker is."""

    def __init__(self, of: Looping, timeout: timedelta) -> None:
        super().__init__(of, timeout)
        self._loop = of
        self._updates: Updates | None = None
        self._set_up: list[object] = []
        self.set_ups: Alike = Unasked()
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
