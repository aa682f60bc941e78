"""Counts by hand."""

from dataclasses import replace

from lightning_decentral.elastic.plan.view import View
from lightning_decentral.elastic.plan.watch import PACED, REMEMBERED, Watch, came_and_went


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
    assert came_and_went(views) == (3, 3, 0)
    assert came_and_went(views[:1]) == (0, 0, 0)
    said = [*views[:-1], replace(views[-1], left=tuple(set(views[-1].before) - set(views[-1].members))[:1])]
    assert came_and_went(said) == (3, 2, 1)


def test_rounds_that_wait_in_turn_have_about_the_pace_of_their_mean() -> None:
    """As on links of 10 Mb/s: a median would be a fortieth of it, and a view that begins in a second far ahead."""
    watch, seconds = Watch(), [0.01, 0.01, 1.18]
    for round in range(30):
        watch.took(seconds[round % 3])
        assert watch.pace == 0 if round < PACED - 1 else 0.4 / 2.5 < watch.pace < 0.4 * 1.5
