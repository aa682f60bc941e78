"""A run of many views and joins: what a newcomer is given doesn't grow, and it deals as the members."""

import random
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lightning_decentral.elastic.plan import dealing as dealings
from lightning_decentral.elastic.plan.chronicle import Missed
from lightning_decentral.elastic.plan.dealing import Calendar, Dealing
from lightning_decentral.elastic.plan.view import View
from lightning_decentral.elastic.wire import course
from lightning_decentral.elastic.wire.course import Course
from lightning_decentral.shared.wire.plain import pack

EXAMPLES, BATCH = 300, 2


class Member(Course):
    """Of a run that the test makes."""

    def __init__(self, name: str) -> None:
        self.state = SimpleNamespace(views={}, entered={})
        worker: Any = SimpleNamespace(name=name, lobby_client=SimpleNamespace(state=self.state))
        super().__init__(worker)

    def enters(self, view: View) -> None:
        self.view, self.next_round = view, view.first_round
        self.state.views = {view.number: view}
        self._learn_of(view)

    def batch(self) -> Any:
        return next(iter(self._shares(self._dealings[0])))


def size(given: Any) -> int:
    packed = pack(given)
    return len(packed.head) + sum(map(len, packed.payload))


def soak(views: int) -> list[int]:
    """Sizes of what newcomers were given; each deals as a member that was there before."""
    draw, names, sizes = random.Random(0), ["m0", "m1", "m2"], list[int]()
    stays = Member("stays")
    stays.calendar, stays.seed = Calendar(25), 3
    before: tuple[str, ...] = ("stays", *names)
    for number in range(1, views + 1):
        if number > 1:
            names = names[1:] if len(names) > 3 or draw.random() < 0.5 else names
            names = [*names, f"m{number + 2}"] if len(names) < 4 else names
        view = View(number, ("stays", *names), 7 * number, before, "stays", 4)
        stays.enters(view)
        if number == 1:
            stays.deals(Dealing(EXAMPLES, BATCH))
        elif new := set(view.members) - set(before):
            newcomer = Member(new.pop())
            newcomer.enters(view)
            sizes.append(size(stays.given()))
            newcomer.learn(stays.given())
            newcomer.deals(Dealing(EXAMPLES, BATCH))
            own = newcomer.batch()
            assert np.array_equal(own, stays._dealings[0].share(7 * number, newcomer.worker.name))
            assert newcomer.counts() == stays.counts()
        stays.batch()
        before = view.members
    return sizes


@pytest.mark.parametrize("views", [200, pytest.param(10_000, marks=pytest.mark.thorough)])
def test_what_a_newcomer_is_given_does_not_grow(views: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dealings, "LATE_TICKS", 100)
    sizes = soak(views)
    assert len(sizes) > views / 10
    assert max(sizes[len(sizes) // 2 :]) <= 1.1 * max(sizes[: len(sizes) // 2])


def test_the_course_comes_from_the_view_in_which_a_worker_takes_part() -> None:
    """It was healed before the first view, or two views ago: what it knew is another run's."""
    member, newcomer = Member("a"), Member("me")
    member.calendar, member.seed = Calendar(100, weights=4), 5
    views = [
        View(1, ("a", "b*3@x:1"), 0, ("a", "b*3@x:1"), "a", 2),
        View(2, ("a",), 10, ("a", "b*3@x:1"), "a", 2),
        View(3, ("a", "c"), 20, ("a",), "a", 2),
        View(4, ("a", "c", "me"), 30, ("a", "c"), "a", 2),
    ]
    for view in views:
        member.enters(view)
        if view.number == 1:
            member.deals(Dealing(1000, 4))
    newcomer.enters(views[3])
    newcomer.learn(member.given())
    newcomer.deals(Dealing(1000, 4))
    assert (newcomer.calendar, newcomer.seed) == (member.calendar, member.seed)
    true = Dealing(1000, 4, seed=5, views={view.first_round: view.members for view in views})
    assert np.array_equal(newcomer.batch(), true.share(30, "me"))


def test_a_member_goes_on_where_a_newcomer_has_come_and_ended_at_once() -> None:
    """Both know a view that neither has begun; the other says so a little later."""
    member, true = Member("me"), Dealing(1000, 4)
    member.calendar = Calendar(100)
    views = [View(1, ("a", "me"), 0, ("a", "me"), "a", 2), View(3, ("a", "me"), 30, ("a", "me", "new"), "a", 2)]
    member.enters(views[0])
    member.deals(Dealing(1000, 4))
    member.enters(views[1])
    later = threading.Timer(0.2, member.state.entered.update, [{"a": ((1, 0), (3, 30))}])
    later.start()
    true.enter(0, ("a", "me"))
    assert np.array_equal(member.batch(), true.share(30, "me"))


def test_who_cannot_know_who_trained_is_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(course, "ASK_SECONDS", 0.1)
    member = Member("me")
    member.calendar = Calendar(100)
    member.enters(View(1, ("a", "me"), 0, ("a", "me"), "a", 2))
    member.deals(Dealing(1000, 4))
    member.enters(View(4, ("c", "me"), 30, ("d", "me"), "a", 2))
    with pytest.raises(Missed, match="knows memberships 1 and 4"):
        member.batch()


def test_other_data_than_the_members_is_refused() -> None:
    member, newcomer = Member("a"), Member("b")
    member.calendar = Calendar(100)
    member.enters(View(1, ("a",), 0, ("a",), "a", 1))
    member.deals(Dealing(1000, 4))
    newcomer.learn(member.given())
    with pytest.raises(ValueError, match=r"has 999 examples in batches of 4, .* the run's has 1000 examples"):
        newcomer.deals(Dealing(999, 4))


def test_loaders_that_are_loaded_again_keep_one_dealing() -> None:
    member = Member("a")
    member.calendar = Calendar(100)
    member.enters(View(1, ("a",), 0, ("a",), "a", 1))
    for place in (0, 1, 0, 1, 0, 1):
        member.deals(Dealing(1000, 4), place)
    assert len(member._dealings) == 2
    member.next_round = 3
    first = member.batch()
    member.deals(Dealing(1000, 4))
    assert np.array_equal(member.batch(), first)
    member.deals(Dealing(900, 4))
    assert max(member.batch()) < 900
