"""No schedule deadlocks in NCCL's order, whatever waits for whole devices; what it would deadlock with is seen to."""

from collections.abc import Hashable, Sequence
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_decentral.pipeline import ExactActivations, Keep, OneForwardOneBackward, TeraPipe, ZeroBubble
from lightning_decentral.pipeline.plan.schedule import in_step
from lightning_decentral.pipeline.wire.stage_runner import StageRunner
from tests.pipeline.nccl_order import ahead, ends, everyone, just_in_time, one, programs, slower

SCHEDULES = [TeraPipe(), OneForwardOneBackward(), ZeroBubble()]
SIZES = st.tuples(st.integers(2, 8), st.integers(1, 8), st.integers(1, 16))
"""(stages, micro-batches, slices)"""
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: type(schedule).__name__)


def by_direction(workers: Sequence[int], number: int) -> Hashable:
    """All links of one direction in one communicator: the groups come by twos, behind that of all stages."""
    return "all" if number == 0 else number % 2


@pytest.mark.sampled
@every_schedule
@settings(max_examples=20)
@given(size=SIZES)
@example(size=(4, 2, 1))
@example(size=(8, 8, 16))
def test_no_step_deadlocks_whatever_drains_devices(schedule, size):
    """Of 896 sizes; `python -m tests.pipeline.nccl_order` goes through all of them."""
    assert ends(programs(schedule, *size), drains=everyone)


@pytest.mark.sampled
@every_schedule
@settings(max_examples=20)
@given(size=SIZES)
def test_two_ahead_one_drained_stage_is_enough(schedule, size):
    """Without it nothing is lost, which is how it long went unseen."""
    asked = programs(schedule, *size, posting=ahead)
    assert ends(asked)
    assert not ends(asked, drains=one(0))


@pytest.mark.parametrize("schedule", SCHEDULES[1:], ids=lambda schedule: type(schedule).__name__)
def test_just_in_time_large_messages_are_in_the_way_of_two_drained_stages(schedule):
    """Each has sent what the other is to hear, and neither can say that it hears."""
    asked = programs(schedule, 4, 4, 4, posting=just_in_time)
    assert all(ends(asked, drains=one(stage)) for stage in range(4))
    assert ends(asked, drains=everyone, rests=False)
    assert not ends(asked, drains=everyone)


@pytest.mark.parametrize("schedule", SCHEDULES[1:], ids=lambda schedule: type(schedule).__name__)
@pytest.mark.parametrize("stages", [4, 6])
def test_with_one_communicator_for_all_links_a_send_waits_behind_a_receive(schedule, stages):
    """From four stages on: each second one sends what the next needs behind what it is to hear from it."""
    assert not ends(programs(schedule, stages, 4, 2, by_direction, ahead), connects=False)
    assert ends(programs(schedule, 3, 4, 2, by_direction, ahead), connects=False)


@every_schedule
def test_an_edge_that_isnt_connected_first_holds_up_the_hosts(schedule, monkeypatch):
    """Two ahead, stage 0 posts the first gradient's receive before it sends what that is the gradient of."""
    monkeypatch.setattr("lightning_decentral.pipeline.stage_layout.connect", lambda *_, **__: None)
    assert not ends(programs(schedule, 2, 1, 1, posting=ahead))
    assert ends(programs(schedule, 2, 1, 1, posting=ahead), connects=False)
    assert ends(programs(schedule, 2, 1, 1))


@pytest.mark.parametrize(("queued", "posting"), [(True, in_step), (False, ahead)], ids=["nccl", "gloo"])
def test_a_stage_posts_in_step_where_waits_are_the_streams(queued, posting):
    over = SimpleNamespace(rank=1, size=3, queued=queued)
    parts = {"schedule": SCHEDULES[1], "activations": Keep(), "boundary": ExactActivations()}
    pipe = StageRunner(None, None, over, {}, device=torch.device("cpu"), **parts)
    stages = SCHEDULES[1].actions(3, 4, 2)
    assert pipe.program(4, 2) == (stages[1], posting(stages, 2)[1])
    assert in_step(stages, 2)[1] != ahead(stages, 2)[1]


@pytest.mark.thorough
@every_schedule
@settings(max_examples=20)
@given(size=SIZES)
@example(size=(3, 8, 1))
def test_in_step_costs_next_to_nothing(schedule, size):
    in_time, ahead_of_it = (programs(schedule, *size, posting=posting) for posting in (in_step, ahead))
    assert slower(schedule, in_time, ahead_of_it) < 1.02
