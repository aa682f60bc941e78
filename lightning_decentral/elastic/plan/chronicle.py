"""A member's history of its last rounds (their seconds, the share of workers) and of the run's memberships (views).

The newest views are kept, and of older ones the numbers of members that joined and left. So memory doesn't grow with
the number of views."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from statistics import fmean, median

from lightning_decentral.elastic.plan.view import View

REMEMBERED, PACED = 100, 7


class Watch:
    """Statistics of one member's last `REMEMBERED` rounds."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=REMEMBERED)
        self._shares: deque[float] = deque(maxlen=REMEMBERED)

    def took(self, seconds: float) -> None:
        """Record the seconds of a round, from its beginning to the beginning of the next round."""
        self._seconds.append(seconds)

    def began(self, present: int, most: int) -> None:
        """Record that a round begins with `present` of `most` workers."""
        self._shares.append(present / most)

    @property
    def pace(self) -> float:
        """Mean seconds of the last rounds, without the longest one; 0 (unknown) after fewer than `PACED` rounds."""
        # No median: on slow links a few rounds wait for several others, and most take almost no time. A view planned by
        # the median would begin far too many rounds ahead.
        last = sorted(islice(reversed(self._seconds), PACED))
        return fmean(last[:-1]) if len(last) == PACED else 0.0

    @property
    def stall(self) -> float:
        """Seconds by which the longest round exceeded the median round: the cost of a death or of a validation."""
        return max(self._seconds) - median(self._seconds) if self._seconds else 0.0

    @property
    def participation(self) -> float:
        """Mean share of the workers that took part; 1 before the first round."""
        return fmean(self._shares) if self._shares else 1.0


KEPT_VIEWS = 32
HISTORY = 4  # Begun views that a member remembers: more than can begin while a message is under way.


@dataclass(frozen=True)
class ViewCounts:
    """Counts over views so far: members that joined later, that were lost (died or silent), and that left; the largest
    number of members of a view."""

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
    """Raised if memberships (views) have begun and ended without this worker's knowledge."""


def new(views: Mapping[int, View], view: View, firsts: Callable[[int], list[int]], complete: bool = True) -> list[View]:
    """Return the view if it is new, after the view before it if that one has begun and wasn't known. Missed if the
    members before this view can't be known.

    A view that no member has begun makes no difference (a worker that joins and ends at once leaves such views).
    `views` are the remembered views, by number; `firsts` returns a view's first rounds as members remember them;
    `complete` is True if all members have sent their history."""
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
            f"this worker knows memberships {before} and {view.number}, but not those between them: start it again, "
            "and it joins as a new worker"
        )
    missed = View(
        view.number - 1, view.before, min(begun[view.number - 1]), views[before].members, view.origin, view.founders
    )
    return [missed, view]


def kept(views: Mapping[int, View], tally: ViewCounts) -> tuple[dict[int, View], ViewCounts]:
    """Return the newest views, and the tally with the older views counted."""
    numbers = sorted(views)
    for number in numbers[:-KEPT_VIEWS]:
        tally += views[number]
    return {number: views[number] for number in numbers[-KEPT_VIEWS:]}, tally
