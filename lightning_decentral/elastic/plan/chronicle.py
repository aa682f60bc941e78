"""Memory of a member: its last rounds (how long they took, who took part), and the run's views.

Of the views it keeps the newest, and of the others how many members came and went: a run of a thousand views keeps
what one of a hundred keeps.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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


KEPT_VIEWS = 32
HISTORY = 4  # Views that have begun and that a member remembers: more than change while a message is under way.


@dataclass(frozen=True)
class ViewCounts:
    """Members that joined the first ones, that died or fell silent, and that left, up to the last of some views; the
    most members of one of them."""

    came: int = 0
    lost: int = 0
    left: int = 0
    most: int = 0

    def __add__(self, view: View) -> "ViewCounts":
        most = max(self.most, len(view.members))
        if view.number == 1:
            return replace(self, most=most)
        new, gone = set(view.members).difference(view.before), set(view.before).difference(view.members)
        left = len(view.left)
        return ViewCounts(self.came + len(new), self.lost + len(gone) - left, self.left + left, most)


class Missed(RuntimeError):
    """Views came and went that this worker missed."""


def new(views: Mapping[int, View], view: View, firsts: Callable[[int], list[int]], complete: bool = True) -> list[View]:
    """The view, where it is new, with the one before it, where that wasn't known and has begun. Missed where it isn't
    enough to know who was in the view before.

    A view that no member has begun made no difference: who joins and ends at once leaves some. `views` are those that
    are remembered, by number; `firsts` returns a view's first rounds, as members remember them; `complete`: whether all
    of them have sent what they remember.
    """
    before = max((number for number in views if number < view.number), default=None)
    if view.number in views or (before is None and views):
        return []
    if before in (None, view.number - 1):
        return [view]
    assert before is not None
    between = range(before + 1, view.number)
    begun = {number: found for number in between if (found := firsts(number))}
    if not begun and complete and len(between) < HISTORY:
        return [view]
    if set(begun) != {view.number - 1} or (len(between) > 1 and not complete):
        raise Missed(
            f"this worker knows view {before}, is in view {view.number}, and doesn't know who trained between "
            "them: start it again, it joins as a new one"
        )
    missed = View(
        view.number - 1, view.before, min(begun[view.number - 1]), views[before].members, view.origin, view.founders
    )
    return [missed, view]


def kept(views: Mapping[int, View], tally: ViewCounts) -> tuple[dict[int, View], ViewCounts]:
    """The newest of them, and the tally with the others."""
    numbers = sorted(views)
    for number in numbers[:-KEPT_VIEWS]:
        tally += views[number]
    return {number: views[number] for number in numbers[-KEPT_VIEWS:]}, tally
