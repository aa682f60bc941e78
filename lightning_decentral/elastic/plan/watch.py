"""Memory of one member of the last rounds: how long they took, and which share of the workers took part."""

from collections import deque
from collections.abc import Collection, Iterable
from itertools import islice
from statistics import fmean, median

from lightning_decentral.elastic.plan.view import View

REMEMBERED, PACED = 100, 7


class Watch:
    """Rounds of one member, the last `REMEMBERED`."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=REMEMBERED)
        self._shares: deque[float] = deque(maxlen=REMEMBERED)

    def took(self, seconds: float) -> None:
        """The round before, from its beginning to the next one's."""
        self._seconds.append(seconds)

    def began(self, present: int, most: int) -> None:
        """A round begins with so many of so many workers."""
        self._shares.append(present / most)

    @property
    def pace(self) -> float:
        """Seconds that a round takes now, whatever a single one waited for; 0: unknown, as there were too few."""
        # No median: on slow links some rounds wait for several, and most take next to nothing. A view that begins as
        # many of these later would seem far ahead to everybody.
        last = sorted(islice(reversed(self._seconds), PACED))
        return fmean(last[:-1]) if len(last) == PACED else 0.0

    @property
    def stall(self) -> float:
        """Seconds by which the longest round was longer than is usual: what a death cost, or a validation."""
        return max(self._seconds) - median(self._seconds) if self._seconds else 0.0

    @property
    def participation(self) -> float:
        """Mean share of the workers that took part; 1 before the first round."""
        return fmean(self._shares) if self._shares else 1.0


def came_and_went(views: Iterable[View]) -> tuple[int, int, int]:
    """Members that joined the first ones, that died or fell silent, and that left, up to the last of these views."""
    later = [view for view in views if view.number > 1]
    left = sum(len(view.left) for view in later)
    went = sum(_but(view.before, view.members) for view in later)
    return sum(_but(view.members, view.before) for view in later), went - left, left


def _but(some: Collection[str], others: Collection[str]) -> int:
    return len(set(some) - set(others))
