"""The lobby alone: beats in, words out, at times that the test says."""

from dataclasses import replace

from lightning_decentral.elastic.plan.lobby_state import LobbyState
from lightning_decentral.elastic.plan.messages import Heartbeat, LobbyUpdate
from lightning_decentral.elastic.plan.view import Bounds, Times, View

TIMES = Times(1.0)
FOUR = View(3, ("a", "b", "c", "d"), 10, ("a", "b", "c", "d"), "a", 4)


class Hall:
    """A lobby and its clock."""

    def __init__(self, least: int = 3, most: int = 5) -> None:
        self.lobby, self.now, self.count = LobbyState(Bounds(least, most), TIMES, 0.0), 0.0, 0
        self.words: dict[str, LobbyUpdate] = {}

    def hear(self, *beats: Heartbeat) -> None:
        for beat in beats:
            self.count += 1
            self.lobby, words = self.lobby.received(replace(beat, count=self.count), self.now)
            self.words.update(words)

    def wait(self, seconds: float, *beats: Heartbeat) -> None:
        """While these beat."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now = min(end, self.now + TIMES.beat)
            self.hear(*beats)
            self.lobby, words = self.lobby.ticked(self.now)
            self.words.update(words)


def member(name: str, view: View = FOUR, coming: View | None = None, round: int = 20) -> Heartbeat:
    return Heartbeat(name, 0, f"{name}:1", view, coming, round, ((view.number, view.first_round),), 0.1, "a")


def newcomer(name: str, **known: str) -> Heartbeat:
    return Heartbeat(name, 0, f"{name}:1", **known)  # type: ignore[arg-type]


def running(least: int = 3, most: int = 5) -> Hall:
    hall = Hall(least, most)
    hall.hear(*map(member, "abcd"))
    hall.wait(2.0, *map(member, "abcd"))
    return hall


def test_a_run_begins_with_the_oldest_ones_parameters() -> None:
    hall = Hall()
    hall.wait(1.4, *map(newcomer, "abc"))
    assert [hall.words[n].founder for n in "abc"] == [True, False, False]
    hall.wait(0.2, newcomer("a", origin="a"), newcomer("b"), newcomer("c"))
    assert [hall.words[n].donor for n in "abc"] == [None, ("a", "a:1"), ("a", "a:1")]
    hall.wait(1.4, *(newcomer(n, origin="a") for n in "abc"))
    assert hall.lobby.view == View(1, ("a", "b", "c"), 0, ("a", "b", "c"), "a", 3)


def test_every_view_tells_how_many_began_the_run() -> None:
    """A newcomer may come before anybody has counted the examples, and be first in a view that isn't the second."""
    hall = running()
    for last in ("abcde", "bcde"):
        hall.wait(4.0, *(member(n, hall.lobby.view or FOUR) if n != "e" else newcomer(n, origin="a") for n in last))
    assert hall.lobby.view is not None
    assert hall.lobby.view.number > FOUR.number
    assert hall.lobby.view.founders == len(FOUR.members)


def test_fewer_workers_than_the_least_begin_nothing_and_set_themselves_up() -> None:
    hall = Hall()
    hall.wait(3.0, *map(newcomer, "ab"))
    hall.wait(3.0, newcomer("a", origin="a"), newcomer("b"))
    assert hall.words["b"].donor == ("a", "a:1")
    assert not any(word.view for word in hall.words.values())
    assert hall.words["a"].paused == "waiting for 3 workers, 2 are here"


def test_where_the_first_one_ends_in_its_set_up_the_next_one_is_the_first() -> None:
    """What is wrong with all of them each finds by itself: nobody waits for who is gone."""
    hall = Hall()
    hall.wait(1.4, *map(newcomer, "abc"))
    hall.hear(replace(newcomer("a", origin="a"), leaving=True))
    hall.wait(TIMES.beat, newcomer("b", donor="a"), newcomer("c", donor="a"))
    hall.wait(TIMES.beat, newcomer("b", donor="a"), newcomer("c", donor="a"))
    assert hall.words["b"].founder
    hall.hear(newcomer("b", origin="b"), newcomer("c", donor="a"))
    assert hall.words["c"].donor == ("b", "b:1")


def test_whoever_comes_when_all_members_have_ended_is_told_so() -> None:
    hall = running()
    hall.hear(*(replace(member(name), leaving=True) for name in "abc"))
    hall.hear(newcomer("x"))
    assert not hall.words["x"].over
    hall.hear(replace(member("d"), leaving=True), newcomer("x"))
    assert hall.words["x"].over


def test_parameters_of_another_run_are_not_taken() -> None:
    hall = running()
    hall.hear(newcomer("x", origin="y"))
    assert hall.words["x"].out


def test_a_view_begins_by_the_pace_of_most_members() -> None:
    """On slow links one has had a few quick rounds: what it would make in a second is far ahead of what all can."""
    hall = running()
    hall.wait(1.6, *(replace(member(name), pace=pace) for name, pace in zip("abc", (0.1, 0.001, 0.12), strict=True)))
    view = hall.lobby.view
    assert view is not None
    assert view.first_round < 20 + 2 * TIMES.rounds_ahead(0.1)


def test_more_than_half_go_on_without_the_dead_at_a_round_ahead() -> None:
    hall = running()
    hall.wait(1.6, *map(member, "abc"))
    view = hall.lobby.view
    assert view is not None
    assert view.members == ("a", "b", "c")
    assert view.first_round >= 20 + TIMES.beat / 0.1
    assert hall.words["a"].gone == ()
    assert hall.lobby.agreed == 3  # nobody has said that he knows it
    hall.hear(member("a", coming=view), member("b", coming=view))
    assert hall.lobby.agreed == 3  # two of four may be one side of two
    hall.hear(member("c", coming=view))
    assert hall.lobby.agreed == 4


def test_half_of_the_members_wait_and_are_told_why() -> None:
    hall = running(least=3)
    hall.wait(10.0, *map(member, "ab"))
    assert hall.lobby.view == FOUR
    hall.wait(1.0, *map(member, "ab"), newcomer("x", origin="a"), newcomer("y", origin="a"))
    assert hall.lobby.view == FOUR  # of a view that may go on elsewhere newcomers are no members
    assert hall.words["a"].paused == (
        "2 of 4 members are reached, and 3 of them are needed: mend the network, or start the lobby again with a lower "
        "minimum"
    )


def test_half_of_them_go_on_later_where_the_operator_allows_two() -> None:
    hall = running(least=2)
    hall.wait(2.0, *map(member, "ab"))
    assert hall.lobby.view == FOUR
    hall.wait(2.0, *map(member, "ab"))
    assert hall.lobby.view is not None
    assert hall.lobby.view.members == ("a", "b")


def test_one_of_two_goes_on_with_a_newcomer() -> None:
    two = View(3, ("a", "b"), 10, ("a", "b"), "a", 4)
    hall = Hall(least=2)
    hall.wait(2.0, *(member(n, two) for n in "ab"))
    hall.wait(4.0, member("a", two))
    assert hall.lobby.view == two
    assert "and 2 workers are needed: mend the network, start workers, or" in hall.words["a"].paused
    hall.wait(1.0, member("a", two), newcomer("x", origin="a"))
    assert hall.lobby.view is not None
    assert hall.lobby.view.members == ("a", "x")


def test_the_place_of_who_hangs_up_is_healed_for_at_once_and_taken_after_half_a_beat() -> None:
    hall = running(most=4)
    hall.hear(newcomer("x"))
    assert hall.words["x"].donor is None
    hall.lobby = hall.lobby.hung_up("d")
    hall.hear(newcomer("x"))
    assert hall.words["x"].donor == ("a", "a:1")
    hall.wait(0.4 * TIMES.beat, *map(member, "abc"), newcomer("x", origin="a"))
    assert hall.lobby.view == FOUR
    hall.wait(0.2 * TIMES.beat, *map(member, "abc"), newcomer("x", origin="a"))
    assert hall.lobby.view is not None
    assert hall.lobby.view.members == ("a", "b", "c", "x")


def test_who_connects_anew_has_not_ended() -> None:
    hall = running()
    hall.lobby = hall.lobby.hung_up("d")
    hall.wait(0.4 * TIMES.beat, *map(member, "abcd"))
    hall.wait(4 * TIMES.beat, *map(member, "abc"))
    assert hall.lobby.view == FOUR


def test_half_that_hang_up_at_once_are_waited_for_as_ever() -> None:
    hall = running(least=2)
    hall.lobby = hall.lobby.hung_up("c").hung_up("d")
    hall.wait(TIMES.minority - TIMES.beat, *map(member, "ab"))
    assert hall.lobby.view == FOUR


def test_a_view_is_a_beat_ahead_of_where_the_members_are_by_now() -> None:
    hall = running()
    hall.now += 0.75 * TIMES.beat
    hall.hear(newcomer("x", origin="a"))
    assert hall.lobby.view is not None
    assert hall.lobby.view.first_round == 20 + 1 + TIMES.rounds_ahead(0.1)  # a round of 0.1 s since they were heard


def test_a_view_is_sooner_where_members_know_how_long_the_lobbys_answers_take() -> None:
    trips = dict(zip("abcd", (0.01, 0.02, 0.005, 0.0), strict=True))
    for slow, ahead in ((0.0, TIMES.beat), (0.02, 4 * 0.02 + TIMES.beat / 10), (3.0, TIMES.beat)):
        hall = running()
        hall.hear(*(replace(member(name), trip=trip or slow, pace=0.01) for name, trip in trips.items()))
        hall.hear(newcomer("x", origin="a"))
        assert hall.lobby.view is not None
        assert hall.lobby.view.first_round == 20 + 2 + int(ahead / 0.01)


def test_who_leaves_is_not_waited_for() -> None:
    hall = running()
    hall.hear(replace(member("d"), leaving=True))
    assert hall.lobby.view is not None
    assert hall.lobby.view.members == ("a", "b", "c")
    assert hall.lobby.view.left == ("d",)


def test_a_lobby_that_was_cut_off_does_not_go_on_with_those_it_hears_first() -> None:
    hall = running()
    hall.wait(2.0)
    hall.hear(*map(member, "abc"))
    assert hall.lobby.view == FOUR
    assert hall.words["c"].gone == ()
    hall.hear(member("d"))
    hall.wait(2.0, *map(member, "abcd"))
    assert hall.lobby.view == FOUR


def test_a_lobby_started_again_goes_on_from_the_highest_view_anybody_knows() -> None:
    next_view = View(4, ("a", "b", "c"), 30, FOUR.members, "a", 4)
    hall = Hall()
    hall.hear(member("b"))
    hall.wait(2.0, member("b"), member("c"), member("a", coming=next_view))
    assert hall.lobby.view == next_view
    assert hall.lobby.agreed == 3  # one of four knows it
    hall.hear(member("b", coming=next_view), member("c", coming=next_view))
    assert hall.lobby.agreed == 4


def test_newcomers_of_a_lost_run_do_not_begin_another() -> None:
    hall = Hall()
    hall.wait(5.0, *(replace(newcomer(n, origin="a"), seen=3) for n in "xyz"))
    assert hall.lobby.view is None
    assert hall.words["x"].paused.startswith("no member of view 3 is reached")


def test_a_newcomer_heals_at_a_member_and_at_another_when_that_dies() -> None:
    hall = running(most=6)
    hall.hear(newcomer("x"))
    assert hall.words["x"].donor == ("a", "a:1")
    hall.hear(newcomer("x", donor="a"), newcomer("y"))
    assert hall.words["y"].donor == ("b", "b:1")  # not x, which isn't healed, nor a, which serves
    hall.hear(newcomer("x", failed="a"))
    assert hall.words["x"].donor == ("b", "b:1")
    hall.wait(2.0, *map(member, "acd"), newcomer("y", donor="b"))
    assert hall.words["y"].donor == ("a", "a:1")


def test_a_healed_one_is_a_member_of_the_next_view_and_the_last() -> None:
    hall = running()
    hall.hear(newcomer("x", origin="a"))
    assert hall.lobby.view is not None
    assert hall.lobby.view.members == ("a", "b", "c", "d", "x")
    hall.hear(newcomer("y"))
    assert hall.words["y"].donor is None  # there is no room


def test_who_slept_is_out_for_good() -> None:
    hall = running()
    hall.wait(1.6, *map(member, "abc"))
    view = hall.lobby.view
    hall.hear(member("d"))
    assert not hall.words["d"].out  # it may still be needed
    hall.hear(*(member(n, coming=view) for n in "abc"))
    hall.hear(member("d"))
    assert hall.words["d"].out
    hall.hear(newcomer("d", origin="a"))
    assert hall.words["d"].out


def test_who_slept_so_long_that_it_was_forgotten_is_out_too() -> None:
    """A beat from before it knew of its first view looks like a newcomer's."""
    hall = running()
    hall.wait(1.6, *map(member, "abc"))
    view = hall.lobby.view
    hall.wait(1.0, *(member(n, coming=view) for n in "abc"))
    hall.hear(newcomer("x", origin="a"))
    assert hall.lobby.members == ("a", "b", "c", "x")
    hall.wait(1.0, *(member(n, coming=hall.lobby.view) for n in "abcx"))
    assert "d" not in hall.lobby.guests
    hall.hear(newcomer("d", origin="a"))
    assert hall.words["d"].out
    assert hall.lobby.members == ("a", "b", "c", "x")


def test_nobody_must_catch_up_with_a_newcomer_that_waits_for_the_others() -> None:
    """Where views follow each other quickly all would skip rounds, end and join anew, for ever."""
    hall = running()
    view = View(4, (*FOUR.members, "x"), 60, FOUR.members, "a", 4)
    waits = member("x", view, round=60)
    old = [replace(member(n), view=view) for n in "abcd"]
    hall.hear(waits, *old, old[0])
    assert hall.words["a"].round == 20
    hall.hear(replace(waits, round=61), old[0])
    assert hall.words["a"].round == 61


def test_an_older_beat_that_comes_later_is_ignored() -> None:
    hall = running()
    hall.lobby, words = hall.lobby.received(replace(member("a", round=5), count=1), hall.now)
    assert words == []
    assert hall.lobby.guests["a"].beat.round == 20
