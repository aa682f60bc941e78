"""Memory of a run's views: the newest ones, and of the others how many members came and went.

Short, as it is one rule: a run of a thousand views keeps what one of a hundred keeps.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lightning_decentral.elastic.plan.view import View
from lightning_decentral.elastic.plan.watch import came_and_went

KEPT_VIEWS = 32
HISTORY = 4
"""Views that have begun and that a member remembers: more than change while a message is under way."""


@dataclass(frozen=True)
class Tally:
    """Counts over views that aren't remembered any more.

    Args:
        most: members of one of them.
    """

    came: int = 0
    lost: int = 0
    left: int = 0
    most: int = 0

    def __add__(self, view: View) -> "Tally":
        came, lost, left = came_and_went([view])
        return Tally(self.came + came, self.lost + lost, self.left + left, max(self.most, len(view.members)))


class Missed(RuntimeError):
    """Views came and went that this worker missed."""


def new(views: Mapping[int, View], view: View, firsts: Callable[[int], list[int]], told: bool = True) -> list[View]:
    """The view, where it is new, with the one before it, where that wasn't known and has begun.

    A view that no member has begun made no difference: who joins and ends at once leaves some.

    Args:
        views: by number, that are remembered.
        firsts: a view's first rounds, as members remember them.
        told: whether all of them have sent what they remember.

    Raises:
        Missed: it isn't enough to know who was in the view before.
    """
    before = max((number for number in views if number < view.number), default=None)
    if view.number in views or (before is None and views):
        return []
    if before in (None, view.number - 1):
        return [view]
    assert before is not None
    between = range(before + 1, view.number)
    begun = {number: found for number in between if (found := firsts(number))}
    if not begun and told and len(between) < HISTORY:
        return [view]
    if set(begun) != {view.number - 1} or (len(between) > 1 and not told):
        raise Missed(
            f"this worker knows view {before}, is in view {view.number}, and hasn't been told who trained between "
            "them: start it again, it joins as a new one"
        )
    missed = View(
        view.number - 1, view.before, min(begun[view.number - 1]), views[before].members, view.origin, view.founders
    )
    return [missed, view]


def kept(views: Mapping[int, View], tally: Tally) -> tuple[dict[int, View], Tally]:
    """The newest of them, and the tally with the others."""
    numbers = sorted(views)
    for number in numbers[:-KEPT_VIEWS]:
        tally += views[number]
    return {number: views[number] for number in numbers[-KEPT_VIEWS:]}, tally
