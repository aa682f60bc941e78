"""A worker's place among the others, in a loop that says itself where it is.

Short, and a module of its own: everything else of Fabric's binding is about the loop, this about who is there.
"""

from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Protocol

from lightning_decentral.shared.meeting import Attendance, Attending
from lightning_decentral.shared.updates import IN_LOOP, Trained, Updates


class Looping(Attending, Trained, Protocol):
    """What is asked of a strategy whose loop is the user's."""

    def rounds(self) -> list[int]: ...


class FabricAttendance(Attendance):
    """Says at which step of the user's loop this worker is."""

    def __init__(self, of: Looping, timeout: timedelta) -> None:
        super().__init__(of, timeout)
        self._loop = of
        self._updates: Updates | None = None

    def phase(self) -> str:
        return f"step {self._loop.rounds()[0] + 1}" if self.ready else "set-up"

    def watch(self) -> None:
        """From now on, until `rest`, no optimizer may step past the strategy where rounds follow its updates."""
        if self._updates is None and self._loop.drifts:
            self._updates = Updates(self._loop, IN_LOOP)

    def rest(self) -> None:
        """The loop has ended."""
        if self._updates is not None:
            self._updates.close()
        self._updates = None

    @property
    def updating(self) -> AbstractContextManager[Any]:
        return self._updates or nullcontext()
