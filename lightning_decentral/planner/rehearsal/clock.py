"""The minutes that a rehearsal may take: what is left of them, and of the work, by how long such work took so far.

Short, and a module of its own: it knows nothing of what is trained.
"""

from collections.abc import Callable
from time import monotonic
from typing import TypeVar

Result = TypeVar("Result")


class OutOfTime(Exception):
    """The minutes are over."""


class Clock:
    """Begins now."""

    def __init__(self, minutes: float) -> None:
        self.minutes, self._begun = minutes, monotonic()
        self._expected, self._taken = 0.0, 0.0

    @property
    def rest(self) -> float:
        """Seconds until the minutes are over."""
        return max(0.0, self._begun + 60 * self.minutes - monotonic())

    def tick(self) -> None:
        """Raises OutOfTime behind the end."""
        if not self.rest:
            raise OutOfTime

    def counted(self, expected: float, call: Callable[[], Result]) -> Result:
        """What the call returns; its seconds correct what is expected of others."""
        begun = monotonic()
        found = call()
        self._expected, self._taken = self._expected + expected, self._taken + monotonic() - begun
        return found

    def left(self, expected: float) -> float:
        """Seconds that so much expected work takes, at the pace so far, and no more than there are."""
        pace = self._taken / self._expected if self._expected else 1.0
        return min(self.rest, expected * pace)
