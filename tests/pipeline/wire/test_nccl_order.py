"""No schedule deadlocks in NCCL's order of messages; what it would deadlock with is seen to."""

from collections.abc import Hashable, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_decentral.pipeline import OneForwardOneBackward, TeraPipe, ZeroBubble
from tests.pipeline.nccl_order import ends, programs

SCHEDULES = [TeraPipe(), OneForwardOneBackward(), ZeroBubble()]
SIZES = st.tuples(st.integers(2, 8), st.integers(1, 8), st.integers(1, 16))
"""(stages, micro-batches, slices)"""
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: type(schedule).__name__)


def each_its_own(workers: Sequence[int], number: int) -> Hashable:
    return number


def by_direction(workers: Sequence[int], number: int) -> Hashable:
    """All links of one direction in one communicator: the groups come by twos, behind that of all stages."""
    return "all" if number == 0 else number % 2


@every_schedule
@given(size=SIZES)
@example(size=(4, 2, 1))
@example(size=(8, 8, 16))
def test_no_step_deadlocks(schedule, size):
    """Of 896 sizes; `python -m tests.pipeline.nccl_order` goes through all of them."""
    assert ends(programs(schedule, *size, each_its_own))


@pytest.mark.parametrize("schedule", SCHEDULES[1:], ids=lambda schedule: type(schedule).__name__)
@pytest.mark.parametrize("stages", [4, 6])
def test_with_one_communicator_for_all_links_a_send_waits_behind_a_receive(schedule, stages):
    """From four stages on: each second one sends what the next needs behind what it is to hear from it."""
    assert not ends(programs(schedule, stages, 4, 2, by_direction), connects=False)
    assert ends(programs(schedule, 3, 4, 2, by_direction), connects=False)


@every_schedule
def test_an_edge_that_isnt_connected_first_holds_up_the_hosts(schedule, monkeypatch):
    """Stage 0 posts the first gradient's receive before it sends the hidden state that the gradient is of."""
    monkeypatch.setattr("lightning_decentral.pipeline.stage_layout.connect", lambda *_, **__: None)
    assert not ends(programs(schedule, 2, 1, 1, each_its_own))
    assert ends(programs(schedule, 2, 1, 1, each_its_own), connects=False)
