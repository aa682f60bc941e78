"""Schedules: the causal order, closed forms of bubble and memory, and that the check finds what is wrong."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_decentral.pipeline import OneForwardOneBackward, Schedule, TeraPipe, ZeroBubble
from lightning_decentral.pipeline.plan import schedule as module
from lightning_decentral.pipeline.plan.schedule import (
    Action,
    Kind,
    always,
    check,
    forecast,
    in_flight,
    tasks,
)
from lightning_decentral.shared.plan.timeline import run
from tests.exported import concrete


def by_slice(forward, backward):
    """The same costs on every stage: one number per slice for each direction."""
    return lambda action: {Kind.FORWARD: forward, Kind.BACKWARD: backward}[action.kind][action.slice]


SCHEDULES = [cls() for cls in concrete(module, Schedule)]
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: type(s).__name__)
whole_backward = pytest.mark.parametrize(
    "schedule", [s for s in SCHEDULES if not s.splits], ids=lambda s: type(s).__name__
)
SIZES = st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(1, 6))


def test_schedules_are_found():
    assert {TeraPipe(), OneForwardOneBackward()} <= set(SCHEDULES)


@pytest.mark.sampled
@every_schedule
@given(SIZES)
def test_every_chunk_goes_both_ways_without_deadlock(schedule, sizes):
    check(schedule.actions(*sizes), *sizes[1:])


@whole_backward
@given(SIZES, st.integers(1, 4), st.integers(1, 4))
def test_bubble_of_equal_slices(schedule, sizes, forward, backward):
    """(P - 1) / (M S + P - 1), whatever a backward costs."""
    num_stages, num_microbatches, num_slices = sizes
    found = forecast(schedule, *sizes, by_slice([forward] * num_slices, [backward] * num_slices))
    chunks = num_microbatches * num_slices
    assert found.bubble == pytest.approx((num_stages - 1) / (chunks + num_stages - 1))
    assert found.seconds == pytest.approx((chunks + num_stages - 1) * (forward + backward))


@given(SIZES)
def test_a_split_backward_fills_the_bubble(sizes):
    num_stages, num_microbatches, num_slices = sizes
    chunks, down = num_microbatches * num_slices, num_stages - 1
    found = forecast(ZeroBubble(), *sizes, by_slice([1] * num_slices, [2] * num_slices)).seconds
    whole = forecast(OneForwardOneBackward(), *sizes, by_slice([1] * num_slices, [2] * num_slices)).seconds
    assert 3 * chunks + down <= found <= whole == 3 * (chunks + down)
    if num_microbatches == 1:
        assert found == 3 * chunks + 2 * down
    elif (num_microbatches - 1) * num_slices >= down:
        assert found == 3 * chunks + down


@given(SIZES)
def test_a_split_backward_holds_as_much_as_the_first_stage_of_1f1b(sizes):
    first = in_flight(OneForwardOneBackward().actions(*sizes)[0])
    assert all(in_flight(actions) <= first for actions in ZeroBubble().actions(*sizes))


@given(SIZES)
def test_chunks_in_flight(sizes):
    num_stages, num_microbatches, num_slices = sizes
    chunks = num_microbatches * num_slices
    for stage, actions in enumerate(OneForwardOneBackward().actions(*sizes)):
        assert in_flight(actions) == min(num_stages - 1 - stage + num_slices, chunks)
    assert all(in_flight(actions) == chunks for actions in TeraPipe().actions(*sizes))


@pytest.mark.sampled
@every_schedule
@given(SIZES, st.randoms(use_true_random=False))
def test_tasks_start_after_what_they_need(schedule, sizes, generator):
    costs = {}
    spans = run(
        tasks(schedule.actions(*sizes), sizes[2], lambda a: costs.setdefault(a, generator.random()), always(0.25))
    )
    for actions in schedule.actions(*sizes):
        for action in actions:
            for needed in action.needs(sizes[0], sizes[2]):
                wait = 0.25 if needed.stage != action.stage else 0.0
                assert spans[str(action)].start >= spans[str(needed)].finish + wait - 1e-12


def test_what_an_action_needs():
    forward, backward = Action(Kind.FORWARD, 1, 0, 1), Action(Kind.BACKWARD, 1, 0, 1)
    assert set(forward.needs(3, 3)) == {Action(Kind.FORWARD, 0, 0, 1), Action(Kind.FORWARD, 1, 0, 0)}
    assert set(backward.needs(3, 3)) == {Action(Kind.BACKWARD, 2, 0, 1), Action(Kind.BACKWARD, 1, 0, 2), forward}
    assert Action(Kind.FORWARD, 0, 0, 0).needs(3, 3) == ()


def test_the_check_finds_a_first_slice_that_comes_back_first():
    stages = OneForwardOneBackward().actions(2, 1, 2)
    wrong = [[*actions[:2], actions[3], actions[2]] for actions in stages]
    with pytest.raises(ValueError, match=r"deadlocks: .*stage 1: B stage 1 micro-batch 0 slice 0"):
        check(wrong, 1, 2)


@pytest.mark.parametrize(("change", "words"), [
    (lambda actions: actions[:-1], "stage 0 must take every chunk once each way: B stage 0 micro-batch 0 slice 0"),
    (lambda actions: [*actions, actions[0]], "an action twice"),
    (lambda actions: [*actions[:-1], Action(Kind.BACKWARD, 0, 7, 0)], "foreign"),
])  # fmt: skip
def test_the_check_finds_missing_repeated_and_foreign_actions(change, words):
    stages = TeraPipe().actions(2, 1, 2)
    with pytest.raises(ValueError, match=words):
        check([change(stages[0]), stages[1]], 1, 2)


def test_numbers_below_one_are_refused():
    with pytest.raises(ValueError, match="num_slices must be at least 1, got 0"):
        TeraPipe().actions(2, 1, 0)
