"""A long run's views: few are remembered, all are counted; what was missed is found or said."""

import pytest

from lightning_decentral.elastic.plan.chronicle import KEPT_VIEWS, Missed, Tally, kept, new
from lightning_decentral.elastic.plan.view import View
from lightning_decentral.elastic.plan.watch import came_and_went


def views(count: int) -> list[View]:
    found, there = [], ("a", "b")
    for number in range(1, count + 1):
        before, there = there, (*there[1 if number % 3 else 0 :], f"n{number}")[-5:]
        left = tuple(set(before) - set(there)) if number % 2 else ()
        found.append(View(number, there, 10 * number, before, "a", 2, left))
    return found


def test_few_views_are_remembered_and_all_are_counted() -> None:
    all_of_them, remembered, tally = views(300), dict[int, View](), Tally()
    for view in all_of_them:
        remembered, tally = kept({**remembered, view.number: view}, tally)
    assert len(remembered) == KEPT_VIEWS
    counted = came_and_went(remembered.values())
    told = tuple(a + b for a, b in zip(counted, (tally.came, tally.lost, tally.left), strict=True))
    assert told == came_and_went(all_of_them)
    assert max(tally.most, *(len(v.members) for v in remembered.values())) == max(len(v.members) for v in all_of_them)


def test_one_view_that_was_missed_is_found_and_more_are_said() -> None:
    first, second, third, fourth = views(4)
    found = new({1: first}, third, lambda number: [25, 20] if number == 2 else [])
    assert [(v.number, v.members, v.first_round) for v in found] == [(2, second.members, 20), (3, third.members, 30)]
    assert came_and_went([first, *found]) == came_and_went([first, second, third])
    assert new({1: first, 2: second}, second, lambda number: []) == []
    assert new({2: second}, first, lambda number: []) == []  # older than what is remembered
    with pytest.raises(Missed, match=r"knows view 1, is in view 4, .* start it again"):
        new({1: first}, fourth, lambda number: [20])


def test_views_that_nobody_has_begun_make_no_difference() -> None:
    """A newcomer that was healed and ended at once is in one and not in the next: nobody trained with it."""
    first, _, third, fourth, _, sixth = views(6)
    for view in (third, fourth):
        assert new({1: first}, view, lambda number: []) == [view]
    with pytest.raises(Missed, match="knows view 1, is in view 6"):  # of so many a member's memory may be over
        new({1: first}, sixth, lambda number: [])
    with pytest.raises(Missed, match="knows view 1, is in view 3"):  # somebody hasn't said yet what it has begun
        new({1: first}, third, lambda number: [], told=False)
