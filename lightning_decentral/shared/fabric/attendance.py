"""A worker's place among the others, in a loop that says itself where it is.

Short, and a module of its own: everything else of Fabric's binding is about the loop, this about who is there.
"""

from datetime import timedelta
from typing import Protocol

from lightning_decentral.shared.meeting import Attendance, Attending


class Looping(Attending, Protocol):
    """What is asked of a strategy whose loop is the user's."""

    def rounds(self) -> list[int]: ...


class FabricAttendance(Attendance):
    """Says at which step of the user's loop this worker is."""

    def __init__(self, of: Looping, timeout: timedelta) -> None:
        super().__init__(of, timeout)
        self._loop = of

    def phase(self) -> str:
        return f"step {self._loop.rounds()[0] + 1}" if self.ready else "set-up"
