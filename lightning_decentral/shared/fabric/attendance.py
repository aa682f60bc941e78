"""A worker's place among the others, in a loop that says itself where it is.

Short, and a module of its own: everything else of Fabric's binding is about the loop, this about who is there.
"""

from collections.abc import Callable

from lightning_decentral.shared.meeting import Attendance


class FabricAttendance(Attendance):
    """Says at which step of the user's loop this worker is."""

    def __init__(self, rounds: Callable[[], list[int]]) -> None:
        super().__init__(_nobody)
        self._rounds = rounds

    def phase(self) -> str:
        return f"step {self._rounds()[0] + 1}" if self.ready else "set-up"


def _nobody() -> None:
    """There is no LightningModule."""
