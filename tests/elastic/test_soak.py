"""Nights of an elastic run: the protocol's own code on a virtual clock, and a real host. What is kept doesn't grow."""

import os
import pickle
import sys
import threading
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import pytest

from lightning_decentral.elastic.plan import dealing as dealings
from lightning_decentral.elastic.plan.dealing import Calendar, Dealing
from lightning_decentral.elastic.plan.member_state import MemberState as State
from lightning_decentral.elastic.plan.view import Bounds, View
from lightning_decentral.elastic.wire.sockets.mesh import Mesh, Slot
from tests.elastic.plan.virtual import DEAD, TIMES, World
from tests.elastic.wire.test_course import Member, size

EXAMPLES, BATCH, EPOCH = 300, 2, 25
RECENT = 30  # views and rounds of which the simulation itself remembers everything


class Nights(World):
    """Members that are lost and replaced for ever; every one deals examples, and a newcomer is given what they know.

    Attributes:
        figures: by what is measured, one number for each join or view, in their order.
    """

    def __init__(self, seed: int) -> None:
        self.courses: dict[str, Member] = {}
        self.compared = 0
        self.figures: dict[str, list[int]] = {"given": [], "calls of a first batch": [], "member": [], "lobby": []}
        super().__init__(seed, Bounds(2, 5), 5)  # of three lost at once, as may be in 10,000 views, two go on
        self.net.at(5 * DEAD, self.fault)

    @property
    def living(self) -> list[str]:
        return [name for name, worker in self.workers.items() if worker.alive]

    def fault(self) -> None:
        """One is lost, by a crash or by power-off, or two at once, or one is slow; another comes for each."""
        assert self.lobby is not None
        whole = len(self.living) == 5 and set(self.lobby.members) == set(self.living)
        lost = self.rng.choice((1, 1, 1, 2)) if whole else 0
        for name in self.rng.sample(self.living, lost):
            self.end(name, notice=self.rng.random() < 0.7)
            self.net.at(self.rng.uniform(0.1, DEAD), self.start)
        self.net.at(self.rng.uniform(0.1, 1) * DEAD, self.fault)

    def end(self, name: str, notice: bool) -> None:
        every = self.workers
        self.workers = {other: worker for other, worker in every.items() if worker.alive}
        super().end(name, notice)
        self.workers = every
        self.courses.pop(name, None)
        self._forget()

    def _forget(self) -> None:
        """Of the simulation, which would grow itself."""
        for dead in [name for name, worker in self.workers.items() if not worker.alive][-RECENT - 3 : -RECENT]:
            self.workers[dead].state = State(self.workers[dead].state.mine, TIMES)
            self.workers[dead].frames.clear()
        for record in (self.received, self.broke, self.landed, self.log):
            record.clear()
        newest = max((round for _, round in self.launched), default=0)
        self.launched = {key: view for key, view in self.launched.items() if key[1] > newest - 100}
        for by_view in (self.in_force, self.used):
            for number in sorted(by_view)[:-RECENT]:
                del by_view[number]  # type: ignore[attr-defined]

    def _check(self, name: str, before: State, after: State) -> None:
        super()._check(name, before, after)
        view = after.mine.view
        if view is not None and view != before.mine.view:
            self._deal(name, view, after)

    def _deal(self, name: str, view: View, state: State) -> None:
        comes, course = name not in self.courses, self.courses.setdefault(name, Member(name))
        course.state.views, course.state.entered = state.views, state.entered
        course.view, course.next_round = view, state.mine.entered[-1][1]
        course._learn_of(view)
        if not comes:
            if course.calendar is not None:  # else it still asks
                course.batch()
            self.figures["member"].append(len(pickle.dumps(state)))
            self.figures["lobby"].append(len(pickle.dumps(self.lobby)))
            return
        if view.number == 1:
            course.calendar, course.seed = Calendar(EPOCH), 3
            course.deals(Dealing(EXAMPLES, BATCH))
            return
        self._ask(name, view, course)

    def _ask(self, name: str, view: View, course: Member) -> None:
        """A member that is in this view, as soon as one is."""
        others = [self.courses[other] for other in view.members if other != name and other in self.courses]
        donor = next((other for other in others if view.number in other._views and other.calendar), None)
        if donor is None or self.courses.get(name) is not course:
            if others and name in self.courses:
                self.net.at(TIMES.beat, lambda: self._ask(name, view, course))
            return
        given = donor.given()
        self.figures["given"].append(size(given))
        self.figures["calls of a first batch"].append(calls(lambda: self._first(course, given)))
        # Nobody is asked for what is over, nor for what he hasn't heard of.
        assert course.view is not None
        if course.view.number in donor._views and donor.next_round <= course.next_round:
            assert donor.calendar is not None
            true = donor._dealings[0].share(donor.calendar.tick(course.next_round), name)
            assert np.array_equal(course.batch(), true), "a newcomer deals other examples"
            self.compared += 1

    def _first(self, course: Member, given: Any) -> None:
        course.learn(given)
        course.deals(Dealing(EXAMPLES, BATCH))
        course.batch()


def calls(function: Callable[[], None]) -> int:
    """Of functions: the time that it takes, whatever else the machine does."""
    counted = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return counted


def steady(figures: list[int]) -> bool:
    """The last quarter is what the second was: in the first what is bounded fills."""
    quarter = len(figures) // 4
    early, late = figures[quarter : 2 * quarter], figures[-quarter:]
    return median(late) <= 1.3 * median(early) and max(late) <= 2 * max(early)


@pytest.mark.parametrize("views", [250, pytest.param(10_000, marks=[pytest.mark.thorough, pytest.mark.timeout(1800)])])
def test_what_a_run_keeps_is_that_of_its_members_whatever_its_age(views: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dealings, "LATE_TICKS", 100)
    world = Nights(seed=0)
    until = 0.0
    while world.highest < views:
        until += 10 * DEAD
        world.net.run(until)
    assert len(world.figures["given"]) >= views / 10
    assert world.mixed > views
    assert world.compared > views / 20
    for name, figures in world.figures.items():
        assert steady(figures), (name, figures[:: max(1, len(figures) // 40)])


@pytest.mark.threads
@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="counts descriptors as Linux shows them")
@pytest.mark.parametrize("joins", [40, pytest.param(1000, marks=[pytest.mark.thorough, pytest.mark.timeout(900)])])
def test_a_host_has_the_threads_and_descriptors_of_its_neighbours_alone(joins: int) -> None:
    """Two neighbours at a time, of real connections; the older one ends."""
    own = Mesh("127.0.0.1", "own", {}, threading.Condition())
    there = deque[Mesh]()
    found: list[tuple[int, int, int]] = []
    for nth in range(joins):
        there.append(Mesh("127.0.0.1", f"n{nth}", {}, threading.Condition()))
        for other in there:
            other.send("own", own.place, 1, nth, 0, memoryview(b"text")).wait()
            assert own.take(Slot(other.name, 1, nth, 0), lambda: True)
            own.send(other.name, other.place, 1, nth, 0, memoryview(b"text")).wait()
            assert other.take(Slot("own", 1, nth, 0), lambda: True)
        found.append((threading.active_count(), len(os.listdir("/proc/self/fd")), len(pickle.dumps(sorted(own.lost)))))
        if len(there) == 2:
            gone = there.popleft()
            gone.close()
            own.forget([gone.name])
    for which, name in enumerate(("threads", "descriptors", "names lost")):
        assert steady([figures[which] for figures in found]), name
    for mesh in (own, *there):
        mesh.close()
