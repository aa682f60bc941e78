"""Schedules of faults that a seed decides, on a virtual clock and network."""

import pytest

from lightning_decentral.elastic.plan.member_state import Act, MemberState, Send
from lightning_decentral.elastic.plan.view import Bounds
from tests.elastic.plan.schedules import ends_well, schedule
from tests.elastic.plan.virtual import DEAD, World


def test_whatever_happens_the_run_goes_on_and_keeps_its_mean() -> None:
    """More: python -m tests.elastic.plan.schedules 0 1000"""
    for seed in range(12):
        assert schedule(seed).mixed


def test_a_low_minimum_lets_few_go_on() -> None:
    for seed in range(1000, 1004):
        schedule(seed, strict=False)


def test_a_schedule_is_replayed_by_its_seed() -> None:
    assert schedule(7).log == schedule(7).log


def test_waiting_for_the_dead_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemberState, "expects", lambda self, view, round, peer: True)
    with pytest.raises(AssertionError, match="has waited"):
        schedule(2)


def test_without_faults_nothing_is_refused() -> None:
    world = World(seed=1, bounds=Bounds(3, 5), size=5)
    world.net.run(8 * DEAD)
    ends_well(world)
    assert world.mixed
    assert not world.refused


@pytest.mark.sampled
@pytest.mark.parametrize(("seed", "slow_from"), [(0, 5.25), (3, 5.1), (6, 5.4), (7, 5.15), (8, 5.25)])
def test_rounds_that_become_slow_end_nobody(seed: int, slow_from: float) -> None:
    """A view that was planned by quick rounds is far ahead of all, then: it begins late, and nobody skips rounds for it
    as if the others had come there."""
    world = World(seed, Bounds(2, 4), size=3)
    world.net.run(3 * DEAD)
    founders = [worker for worker in world.workers.values() if worker.alive]
    for until, pace in ((5.0, 0.01), (slow_from, 0.01), (60.0, 0.9)):
        if until == slow_from:
            world.start()
        for worker in founders:
            worker.pace = pace
        world.net.run(until * DEAD)
    for name in ("w0", "w1", "w2"):
        rounds = sorted(round for of, round in world.launched if of == name)
        assert rounds == [*range(rounds[0], rounds[-1] + 1)], "some were skipped"
    view = world.workers["w0"].state.mine.view
    assert view is not None
    assert len(view.members) == 4


def test_who_hears_the_lobby_again_asks_no_longer() -> None:
    """Members ask each other while the lobby is silent, some before it is back and some after; then all are quiet."""
    world = World(seed=5, bounds=Bounds(2, 4), size=4)
    world.net.run(3 * DEAD)
    said: list[float] = []
    do = world._do

    def counted(name: str, act: Act) -> None:
        if isinstance(act, Send) and act.to:
            said.append(world.net.now)
        do(name, act)

    world._do = counted  # type: ignore[method-assign]
    for name, seconds in zip(("w0", "w1", "w2", "w3"), (0.9, 1.2, 1.5, 1.8), strict=True):
        world.cut([name], ["lobby"], seconds * DEAD, breaks=False)
    world.net.run(6 * DEAD)
    assert said
    said.clear()
    world.net.run(9 * DEAD)
    assert not said
    ends_well(world)
