"""A long run's views: few are remembered, all are counted; what was missed is found or refused. Counts by hand."""

from dataclasses import replace

import pytest

from lightning_decentral.elastic.plan.chronicle import (
    KEPT_VIEWS,
    PACED,
    REMEMBERED,
    Missed,
    ViewCounts,
    Watch,
    kept,
    new,
)
from lightning_decentral.elastic.plan.view import View


def views(count: int) -> list[View]:
    found, there = [], ("a", "b")
    for number in range(1, count + 1):
        before, there = there, (*there[1 if number % 3 else 0 :], f"n{number}")[-5:]
        left = tuple(set(before) - set(there)) if number % 2 else ()
        found.append(View(number, there, 10 * number, before, "a", 2, left))
    return found


def test_few_views_are_remembered_and_all_are_counted() -> None:
    all_of_them, remembered, tally = views(300), dict[int, View](), ViewCounts()
    for view in all_of_them:
        remembered, tally = kept({**remembered, view.number: view}, tally)
    assert len(remembered) == KEPT_VIEWS
    found = sum(remembered.values(), tally)
    assert found == sum(all_of_them, ViewCounts())
    assert found.most == max(len(v.members) for v in all_of_them)


def test_one_view_that_was_missed_is_found_and_more_are_said() -> None:
    first, second, third, fourth = views(4)
    found = new({1: first}, third, lambda number: [25, 20] if number == 2 else [])
    assert [(v.number, v.members, v.first_round) for v in found] == [(2, second.members, 20), (3, third.members, 30)]
    assert sum([first, *found], ViewCounts()) == sum([first, second, third], ViewCounts())
    assert new({1: first, 2: second}, second, lambda number: []) == []
    assert new({2: second}, first, lambda number: []) == []  # older than what is remembered
    with pytest.raises(Missed, match=r"knows memberships 1 and 4, .* start it again"):
        new({1: first}, fourth, lambda number: [20])


def test_views_that_nobody_has_begun_make_no_difference() -> None:
    """A newcomer that was healed and ended at once is in one and not in the next: nobody trained with it."""
    first, _, third, fourth, _, sixth = views(6)
    for view in (third, fourth):
        assert new({1: first}, view, lambda number: []) == [view]
    with pytest.raises(Missed, match="knows memberships 1 and 6"):  # of so many a member's memory may be over
        new({1: first}, sixth, lambda number: [])
    with pytest.raises(Missed, match="knows memberships 1 and 3"):  # somebody hasn't said yet what it has begun
        new({1: first}, third, lambda number: [], complete=False)


def test_one_long_round_is_a_stall_and_no_pace() -> None:
    watch = Watch()
    assert (watch.pace, watch.stall, watch.participation) == (0.0, 0.0, 1.0)
    for seconds in [0.5] * 20 + [8.0] + [0.25] * (PACED // 2 + 1):
        watch.took(seconds)
    assert watch.pace == (4 * 0.25 + 2 * 0.5) / 6  # of the last seven but the longest
    assert watch.stall == 8.0 - 0.5  # of all that are remembered
    for _ in range(REMEMBERED):
        watch.took(1.0)
    assert watch.stall == 0.0


def test_participation_is_a_mean_share() -> None:
    watch = Watch()
    for present in (4, 4, 3, 1):
        watch.began(present, 4)
    assert watch.participation == (4 + 4 + 3 + 1) / 16
    for _ in range(REMEMBERED):
        watch.began(2, 4)
    assert watch.participation == 0.5


def test_who_came_and_went_is_counted_from_view_to_view() -> None:
    views, members = [View(1, ("a", "b", "c"), 0, ("a", "b", "c"), "a", 3)], ("a", "b", "c")
    for number, after in enumerate([("a", "c"), ("a", "c", "d", "e"), ("d", "e", "f")], 2):
        views, members = [*views, View(number, after, 10 * number, members, "a", 4)], after
    assert sum(views, ViewCounts()) == ViewCounts(3, 3, 0, most=4)
    assert sum(views[:1], ViewCounts()) == ViewCounts(most=3)
    announced = [*views[:-1], replace(views[-1], left=tuple(set(views[-1].before) - set(views[-1].members))[:1])]
    assert sum(announced, ViewCounts()) == ViewCounts(3, 2, 1, most=4)


def test_rounds_that_wait_in_turn_have_about_the_pace_of_their_mean() -> None:
    """As on links of 10 Mb/s: a median would be a fortieth of it, and a view that begins in a second far ahead."""
    watch, seconds = Watch(), [0.01, 0.01, 1.18]
    for round in range(30):
        watch.took(seconds[round % 3])
        assert watch.pace == 0 if round < PACED - 1 else 0.4 / 2.5 < watch.pace < 0.4 * 1.5
