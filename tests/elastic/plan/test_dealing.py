"""Passes over the examples: each is dealt to exactly one of those that are there when its pass ends."""

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_decentral.elastic.plan import dealing as module
from lightning_decentral.elastic.plan.dealing import Calendar, Dealing
from lightning_decentral.elastic.plan.view import name_of, place_of, weight_of
from lightning_decentral.shared.wire.plain import pack, unpack

NAMES = "a", "b", "c*2@h:1", "d*3@h:2", "e", "f"


def test_with_constant_members_a_pass_has_every_example_once() -> None:
    dealing = Dealing(examples=24, batch=2, seed=3)
    dealing.enter(0, "abc")
    first, second = (
        [i for tick in range(start, start + 4) for name in "abc" for i in dealing.share(tick, name)] for start in (0, 4)
    )
    assert sorted(first) == sorted(second) == list(range(24))
    assert first != second


def test_a_member_takes_its_weight_of_every_tick() -> None:
    dealing = Dealing(examples=36, batch=2, seed=3)
    members = [name_of("", "a", 1, "h:1"), name_of("w-", "b", 2, "h:2"), name_of("", "c", 3, "h:3")]
    dealing.enter(0, members)
    taken = {name: [dealing.share(tick, name) for tick in range(3)] for name in members}
    assert [{len(of) for of in taken[name]} for name in members] == [{2}, {4}, {6}]
    assert sorted(i for of in taken.values() for some in of for i in some) == list(range(36))


@given(st.lists(st.tuples(st.integers(1, 5), st.sets(st.sampled_from(NAMES), min_size=1)), min_size=1, max_size=6))
def test_what_a_lost_member_was_dealt_is_dealt_again(changes: list[tuple[int, set[str]]]) -> None:
    dealing, views, tick = Dealing(examples=97, batch=2), {}, 0
    before, gone = set[str](), set[str]()
    for ticks, wanted in changes:
        present = wanted - gone or {f"z{tick}"}  # a name doesn't come back
        gone, before = gone | (before - present), present
        views[tick] = tuple(sorted(present))
        dealing.enter(tick, views[tick])
        tick += ticks
    taken: dict[str, list[int]] = {}
    members, passed = views[0], -1
    for now in range(tick + 60):
        number = dealing._pass_of(now).number
        if number > passed:  # those that are there when it ends have every example of it
            if passed >= 0:
                assert_passed(taken, members)
            taken, passed = {}, number
        members = views.get(now, members)
        for name in members:
            taken.setdefault(name, []).extend(dealing.share(now, name))
    assert passed >= 1


def assert_passed(taken: dict[str, list[int]], members: tuple[str, ...]) -> None:
    counted = Counter(i for name in members for i in taken.get(name, []))
    assert set(counted) == set(range(97))
    assert sum(counted.values()) - 97 < 2 * sum(map(weight_of, members))  # the last tick's were filled up


def test_who_hears_of_a_view_late_deals_as_the_others_from_then_on() -> None:
    early, late = (Dealing(examples=50, batch=3, seed=1) for _ in range(2))
    for dealing in (early, late):
        dealing.enter(0, "abc")
    early.enter(4, "ab")
    late.share(5, "a")
    late.enter(4, "ab")
    for tick in range(6, 40):
        assert np.array_equal(early.share(tick, "a"), late.share(tick, "a"))


def test_a_newcomer_that_knows_the_views_deals_as_the_others() -> None:
    there = Dealing(examples=50, batch=3)
    there.enter(0, "ab")
    there.share(30, "a")
    newcomer = Dealing(examples=50, batch=3, views=dict(there.views))
    for dealing in (there, newcomer):
        dealing.enter(35, "abc")
    assert np.array_equal(there.share(36, "c"), newcomer.share(36, "c"))


def given_to_newcomer(dealing: Dealing) -> Dealing:
    """What comes of it on the other end."""
    made: Dealing = unpack(pack(dealing.copy()))
    return made


class Whole(Dealing):
    """Remembers everything."""

    def _settle(self, tick: int) -> None: ...


@pytest.mark.parametrize(("late", "kept", "examples"), [(5, 0, 97), (20, 3, 7), (60, 10, 2000)])
def test_what_is_kept_is_bounded_and_a_newcomer_deals_as_all(
    late: int, kept: int, examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LATE_TICKS", late)
    monkeypatch.setattr(module, "KEPT_VIEWS", kept)
    draw = random.Random(late)
    whole, own, newcomers = Whole(examples, 2), Dealing(examples, 2), list[Dealing]()
    names, came, most = ["n0", "n1"], 2, 0
    for tick in range(250):
        if tick == 0 or draw.random() < 0.2:
            names = [name for name in names if draw.random() < 0.8] or [f"z{tick}"]
            if draw.random() < 0.6:
                names, came = [*names, f"n{came}"], came + 1
            first = max([tick - draw.randrange(late), *whole.views]) if draw.random() < 0.5 else tick
            for dealing in (whole, own, *newcomers):
                dealing.enter(first, names)  # as they hear of it, some time behind it
        if draw.random() < 0.05:
            newcomers = [*newcomers[-2:], given_to_newcomer(own)]
        for name in whole._members(tick):
            share = whole.share(tick, name)
            for dealing in (own, *newcomers):
                assert np.array_equal(dealing.share(tick, name), share)
        most = max(most, len(own.views) + len(own._starts))
    assert most <= 2 * late + kept + 10
    assert len(whole.views) > 25


def test_a_newcomer_does_not_deal_passes_that_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A permutation of each pass takes seconds, where there are many examples."""
    monkeypatch.setattr(module, "LATE_TICKS", 5)
    made, begun = list[int](), Dealing._begun

    def counted(self: Dealing, of: Any) -> Any:
        made.append(of.number)
        return begun(self, of)

    there = Dealing(examples=50, batch=3)
    there.enter(0, "ab")
    for tick in range(500):
        there.share(tick, "a")
    newcomer = given_to_newcomer(there)
    monkeypatch.setattr(Dealing, "_begun", counted)
    for dealing in (there, newcomer):
        dealing.enter(502, "abc")
    assert np.array_equal(there.share(503, "c"), newcomer.share(503, "c"))
    assert min(made) > 50


def test_other_examples_begin_a_new_pass_for_all() -> None:
    before, other = Dealing(50, 3), Dealing(60, 3)
    for tick, members in {0: "ab", 7: "abc"}.items():
        before.enter(tick, members)
    before.share(20, "a")
    other.begin(before, 21)
    newcomer = given_to_newcomer(other)
    taken = [i for tick in range(21, 28) for name in "abc" for i in other.share(tick, name)]
    assert set(taken) == set(range(60))
    assert np.array_equal(newcomer.share(30, "c"), other.share(30, "c"))


def test_few_examples_are_repeated_and_strangers_have_no_share() -> None:
    dealing = Dealing(examples=3, batch=4, shuffle=False)
    dealing.enter(0, "ab")
    assert dealing.share(0, "b").tolist() == [1, 2, 0, 1]
    with pytest.raises(KeyError):
        dealing.share(0, "c")


def test_the_calendar_counts_epochs_whole() -> None:
    calendar = Calendar(batches=5, accumulated=2, before=3 + 1, steps=7)  # an epoch's rounds, and one
    assert [calendar.place(r) for r in range(4)] == [(1, 2), (1, 4), (2, 0), (2, 2)]
    assert [calendar.tick(r) for r in range(3)] == [7, 9, 10]
    assert calendar.step(3) == 10


@pytest.mark.parametrize(("title", "weight"), [("", 1), ("w3-", 1), ("w*-", 1), ("", 2), ("a*7@b", 12)])
def test_a_name_says_its_weight_and_its_place(title: str, weight: int) -> None:
    name = name_of(title.replace("@", ""), "3f2a", weight, "10.0.0.1:400")
    assert (weight_of(name), place_of(name)) == (weight, "10.0.0.1:400")
