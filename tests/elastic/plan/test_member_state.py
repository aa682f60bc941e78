"""A member alone: words and other members' beats in, beats and permission out."""

from dataclasses import replace

import pytest

from lightning_decentral.elastic.plan.member_state import Fetch, MemberState, Send
from lightning_decentral.elastic.plan.messages import Heartbeat, LobbyUpdate
from lightning_decentral.elastic.plan.view import Bounds, Times, View

TIMES = Times(1.0)
FOUR = View(3, ("a", "b", "c", "d"), 10, ("a", "b", "c", "d"), "a", 4)
THREE = View(4, ("a", "b", "c"), 30, FOUR.members, "a", 4)
UPDATE = LobbyUpdate(0, FOUR, 3, (), {}, 0, None, False, False, False, "", 3, 1.0)


def of_four(now: float = 0.0) -> MemberState:
    """a, in view 3, which the lobby has just answered."""
    state = replace(MemberState(Heartbeat("a", 0, "a:1", origin="a"), TIMES), least=3)
    state, _ = state.ticked(now)
    return state.notified(replace(UPDATE, acknowledged=1), now)[0]


def beat(name: str, view: View = FOUR) -> Heartbeat:
    return Heartbeat(name, 1, f"{name}:1", view, round=20, entered=((view.number, view.first_round),), origin="a")


def test_a_newcomer_asks_fetches_and_waits_for_the_next_view() -> None:
    state, acts = MemberState(Heartbeat("x", 0, "x:1"), TIMES).ticked(0.0)
    assert [act.to for act in acts if isinstance(act, Send)] == [""]
    assert not state.serves
    state, acts = state.notified(replace(UPDATE, donor=("b", "b:1")), 0.1)
    assert Fetch("b", "b:1") in acts
    assert not state.fetched("c", "a", 25, 0.15)[0].serves  # not its donor
    state, acts = state.fetched("b", "a", 25, 0.15)
    assert [act.beat.origin for act in acts if isinstance(act, Send)] == ["a"]  # at once
    assert state.serves
    assert state.waits(0.1) == "waiting for the next view"
    joined, _ = state.notified(replace(UPDATE, view=replace(THREE, members=("a", "x")), agreed=4), 0.2)
    assert joined.mine.round == 30


def test_a_donor_that_fails_is_told_of() -> None:
    state, _ = MemberState(Heartbeat("x", 0, "x:1"), TIMES).notified(replace(UPDATE, donor=("b", "b:1")), 0.1)
    state, acts = state.failed("b", 0.2)
    assert acts
    assert (state.mine.donor, state.mine.failed) == ("", "b")


def test_a_view_is_in_force_when_it_is_agreed_and_its_round_has_come() -> None:
    state = of_four()
    state, acts = state.notified(replace(UPDATE, view=THREE, agreed=3), 0.1)
    assert state.view_of(40) == FOUR
    assert acts  # it says at once that it knows the view
    state, _ = state.notified(replace(UPDATE, view=THREE, agreed=4), 0.2)
    assert [state.view_of(round) for round in (29, 30)] == [FOUR, THREE]


def test_a_view_that_another_follows_at_once_is_entered_too() -> None:
    """Agreed upon, it may be in force for others; who skipped it wouldn't know who trained in it."""
    state, _ = of_four().notified(replace(UPDATE, view=THREE, agreed=3), 0.1)
    following = View(5, ("a", "b", "c", "e"), 33, THREE.members, "a", 4)
    for agreed in (4, 5):
        state, _ = state.notified(replace(UPDATE, view=following, agreed=agreed), 0.2)
    assert [state.view_of(round) for round in (29, 30, 32, 33)] == [FOUR, THREE, THREE, following]


def test_who_hears_of_a_view_late_enters_it_late() -> None:
    state = of_four().begins(34, 0.1)
    state, _ = state.notified(replace(UPDATE, view=THREE, agreed=4), 0.2)
    assert [state.view_of(round) for round in (34, 35)] == [FOUR, THREE]


def test_who_is_far_behind_skips_the_rounds_between() -> None:
    ahead = replace(THREE, first_round=100)
    state, _ = of_four().begins(20, 0.1).notified(replace(UPDATE, view=ahead, agreed=4, round=98), 0.2)
    assert [state.view_of(round) for round in (20, 21, 99, 100)] == [FOUR, None, None, ahead]
    assert state.mine.round == 100
    other, _ = replace(of_four(), mine=replace(of_four().mine, sender="c")).notified(
        replace(UPDATE, view=ahead, agreed=4, entered={"a": state.mine.entered}), 0.2
    )
    assert [other.expects(FOUR, round, "a") for round in (20, 21)] == [True, False]


def test_a_view_far_ahead_is_none_of_those_that_others_have_come_to() -> None:
    """It was planned while rounds were quick, and they are slow now, for all."""
    ahead = replace(THREE, first_round=100)
    state, _ = of_four().begins(20, 3.0).notified(replace(UPDATE, view=ahead, agreed=4, round=23), 0.2)
    assert state.mine.round == 21
    assert [state.view_of(round) for round in (21, 99, 100)] == [FOUR, FOUR, ahead]


@pytest.mark.parametrize("pace", [0.01, 0.2, 3.0])
def test_who_is_in_step_with_the_others_skips_none(pace: float) -> None:
    """Also where rounds are longer than `dead_after`, and a neighbour is some rounds ahead."""
    state = of_four().begins(19, pace)
    first = 20 + TIMES.rounds_ahead(pace) + 2
    state, _ = state.notified(
        replace(UPDATE, acknowledged=1, view=replace(THREE, first_round=first), agreed=4, round=22), 0.1
    )
    assert state.mine.round == 20
    assert state.view_of(20) == FOUR
    assert state.view_of(first) == replace(THREE, first_round=first)


def test_whom_a_later_view_is_without_is_lost_before_that_view_begins() -> None:
    """Though the lobby then speaks of the members of the later one alone."""
    state, _ = of_four().notified(replace(UPDATE, acknowledged=1, gone=("d",)), 0.1)
    assert state.without(FOUR, "d")
    state, _ = state.notified(replace(UPDATE, acknowledged=1, view=THREE, agreed=4), 0.2)
    assert state.view_of(state.mine.round) == FOUR
    assert state.without(FOUR, "d")
    assert not state.without(FOUR, "b")


def test_a_message_is_awaited_from_those_in_the_same_view_in_that_round() -> None:
    state, _ = of_four().notified(replace(UPDATE, view=THREE, agreed=4, entered={"b": ((3, 10), (4, 33))}), 0.1)
    assert state.expects(FOUR, 32, "b")
    assert not state.expects(THREE, 32, "b")
    assert state.expects(THREE, 33, "b")
    assert state.expects(THREE, 31, "c")  # nothing is known of it
    assert not state.expects(FOUR, 29, "d")  # the run went on without it
    state, _ = state.notified(replace(UPDATE, view=THREE, agreed=4, gone=("c",)), 0.2)
    assert not state.expects(THREE, 31, "c")


def test_a_late_answer_says_only_that_the_lobby_heard_an_early_beat() -> None:
    state = of_four(now=0.0)
    state, _ = state.ticked(5.0)
    state, _ = state.notified(replace(UPDATE, acknowledged=1), 5.1)
    assert state.waits(5.1)
    state, _ = state.notified(replace(UPDATE, acknowledged=state.mine.count), 5.2)
    assert not state.waits(5.2)


@pytest.mark.parametrize(("heard", "goes_on"), [("", False), ("b", False), ("bc", True), ("bcd", True)])
def test_without_the_lobby_more_than_half_go_on(heard: str, goes_on: bool) -> None:
    state = of_four()
    for now in (0.4, 0.8):
        state, _ = state.ticked(now)
    for name in heard:
        state, _ = state.met(beat(name), 1.0)
    assert (not state.waits(1.5)) == goes_on


def test_where_few_may_go_on_the_others_must_hear_nearly_all() -> None:
    """A side of two may make a view, so three of five can't know that they are the run."""
    assert not Bounds(2, 5).may_go_on_alone(3, 5)
    assert Bounds(2, 5).may_go_on_alone(4, 5)


def test_members_ask_each_other_where_the_lobby_is_silent() -> None:
    _, acts = of_four().ticked(0.6)
    assert [act.to for act in acts if isinstance(act, Send)] == ["", "b", "c", "d"]


def test_who_hears_the_lobby_answers_who_does_not() -> None:
    _, acts = of_four().met(replace(beat("b"), asks=True), 0.1)
    (answer,) = acts
    assert isinstance(answer, Send)
    assert answer.to == "b"
    assert not answer.beat.asks
    assert of_four().met(replace(answer.beat, sender="b"), 0.1)[1] == []  # else two would answer each other for ever


def test_a_later_view_comes_by_another_member() -> None:
    state, _ = of_four().met(beat("b", THREE), 0.1)
    assert state.view_of(30) == THREE


def test_who_is_in_none_of_them_comes_back_and_is_silent() -> None:
    state, acts = of_four().met(beat("b", View(4, ("b", "c", "d"), 30, FOUR.members, "a", 4)), 0.1)
    assert "view 4, made without" in state.out
    assert acts == []
    assert not state.serves
    assert state.waits(0.1)
    assert state.ticked(9.0)[1] == []


def test_the_lobby_sends_back_whom_the_run_left() -> None:
    state, acts = of_four().notified(replace(UPDATE, out=True), 0.1)
    assert "continued without this worker" in state.out
    assert acts == []


def test_what_a_sleeper_finds_in_its_connections_is_no_sign_of_life() -> None:
    """The others said it while this one slept; they may have gone on without it since."""
    state, _ = of_four().ticked(0.0)
    for name in "bcd":
        state, _ = state.met(beat(name, FOUR), 4 * TIMES.dead_after)
    assert state.waits(4 * TIMES.dead_after)
    state, _ = state.ticked(4 * TIMES.dead_after)
    for name in "bcd":
        state, _ = state.met(beat(name, FOUR), 4 * TIMES.dead_after + 2 * TIMES.beat)
    assert not state.waits(4 * TIMES.dead_after + 2 * TIMES.beat)
