"""Schedules of faults that a seed decides, on a virtual clock and network."""

import pytest

from lightning_decentral.shared.plan.elastic.member import Member
from lightning_decentral.shared.plan.elastic.view import Bounds
from tests.shared.plan.elastic.schedules import ends_well, schedule
from tests.shared.plan.elastic.virtual import DEAD, World


def test_whatever_happens_the_run_goes_on_and_keeps_its_mean() -> None:
    """More: python -m tests.shared.plan.elastic.schedules 0 1000"""
    for seed in range(12):
        assert schedule(seed).mixed


def test_a_low_minimum_lets_few_go_on() -> None:
    for seed in range(1000, 1004):
        schedule(seed, strict=False)


def test_a_schedule_is_replayed_by_its_seed() -> None:
    assert schedule(7).log == schedule(7).log


def test_waiting_for_the_dead_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Member, "expects", lambda self, view, round, peer: True)
    with pytest.raises(AssertionError, match="has waited"):
        schedule(6)


def test_without_faults_nothing_is_refused() -> None:
    world = World(seed=1, bounds=Bounds(3, 5), size=5)
    world.net.run(8 * DEAD)
    ends_well(world)
    assert world.mixed
    assert not world.refused
