"""Plans against brute force over every way to cut, and against the timeline."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from lightning_decentral.pipeline import Balanced, Given, OneForwardOneBackward, Planned, TeraPipe, Uniform
from lightning_decentral.pipeline.plan.schedule import in_flight
from lightning_decentral.pipeline.plan.slicing import Situation, balance, equal, plan

PLANNED = Planned(granularity=32)


def compositions(total: int) -> Iterator[tuple[int, ...]]:
    """Every way to write `total` as an ordered sum."""
    for cuts in itertools.product([False, True], repeat=total - 1):
        lengths = [1]
        for cut in cuts:
            if cut:
                lengths.append(1)
            else:
                lengths[-1] += 1
        yield tuple(lengths)


def costs(slices, seconds):
    return [seconds(tokens, sum(slices[:i])) for i, tokens in enumerate(slices)]


def objective(slices, num_stages, seconds):
    found = costs(slices, seconds)
    return sum(found) + (num_stages - 1) * max(found)


def any_costs(seed):
    """Costs without any order: a plan may not rely on later or longer slices costing more."""
    generator, table = random.Random(seed), {}

    def seconds(tokens, context):
        if (tokens, context) not in table:
            table[tokens, context] = generator.choice([generator.random() + 0.01, generator.randint(1, 5) / 4])
        return table[tokens, context]

    return seconds


def attention(tokens, context):
    """A launch, a matrix product per token, and attention to what came before."""
    return 1e-3 + 1e-5 * tokens + 3e-8 * tokens * (context + tokens / 2)


@pytest.mark.parametrize("seed", range(40))
def test_plan_is_the_best_of_all(seed):
    generator = random.Random(seed)
    length, num_stages = generator.randint(1, 9), generator.randint(1, 6)
    max_slices = generator.choice([None, 1, 2, 3])
    seconds = any_costs(seed)
    allowed = [c for c in compositions(length) if max_slices is None or len(c) <= max_slices]
    best = min(objective(c, num_stages, seconds) for c in allowed)
    found = plan(length, num_stages, seconds, max_slices=max_slices)
    assert found in allowed
    assert objective(found, num_stages, seconds) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_granularity_is_the_plan_of_a_shorter_sequence(seed):
    seconds = any_costs(seed)
    coarse = plan(6, 3, lambda tokens, context: seconds(4 * tokens, 4 * context))
    assert plan(24, 3, seconds, granularity=4) == tuple(4 * tokens for tokens in coarse)


def test_a_length_that_the_granularity_does_not_divide():
    slices = plan(1000, 4, attention, granularity=64)
    assert sum(slices) == 1000
    assert all(tokens % 64 == 0 for tokens in slices[:-1])


@pytest.mark.parametrize("num_stages", [4, 48, 96])
def test_a_long_sequence_is_planned_with_longest_slices_first(num_stages):
    slices = plan(2048, num_stages, attention, granularity=8)
    assert sum(slices) == 2048
    assert list(slices) == sorted(slices, reverse=True)
    assert slices[0] > slices[-1]
    uniform = min(objective((2048 // n,) * n, num_stages, attention) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256))
    assert objective(slices, num_stages, attention) <= uniform


@pytest.mark.parametrize("seed", range(20))
def test_balance_has_the_smallest_largest_slice(seed):
    generator = random.Random(seed)
    length = generator.randint(2, 9)
    count = generator.randint(1, length)
    seconds = any_costs(seed)
    best = min(max(costs(c, seconds)) for c in compositions(length) if len(c) == count)
    found = balance(length, count, seconds)
    assert len(found) == count
    assert sum(found) == length
    assert max(costs(found, seconds)) == best


@pytest.mark.parametrize("schedule", [TeraPipe(), OneForwardOneBackward()], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_simulated_plan_is_no_worse_than_any_uniform_one(schedule, microbatches):
    situation = Situation(
        num_stages=4, seconds=attention, num_microbatches=microbatches, schedule=schedule, link_seconds=5e-4
    )
    slices = PLANNED.slices(1024, situation)
    uniform = [(1024 // n,) * n for n in (1, 2, 4, 8, 16)]
    assert situation.step_seconds(slices) <= min(map(situation.step_seconds, uniform))


def test_under_terapipe_the_simulation_is_the_closed_form():
    situation = Situation(num_stages=5, seconds=attention, schedule=TeraPipe(), backward_over_forward=2.0)
    slices = plan(512, 5, attention, granularity=16)
    assert situation.step_seconds(slices) == pytest.approx(3 * objective(slices, 5, attention), rel=1e-12)


def test_a_memory_bound_is_kept_and_costs_time():
    free = Situation(num_stages=4, seconds=attention, num_microbatches=4)
    tight = Situation(num_stages=4, seconds=attention, num_microbatches=4, max_tokens_in_flight=1500)
    slices = PLANNED.slices(1024, tight)
    first = tight.schedule.actions(4, 4, len(slices))[0]
    assert in_flight(first, slices) <= 1500
    assert tight.step_seconds(slices) >= free.step_seconds(PLANNED.slices(1024, free))
    with pytest.raises(ValueError, match="no plan with at most 16 slices keeps at most 900 tokens"):
        PLANNED.slices(1024, Situation(num_stages=4, seconds=attention, max_tokens_in_flight=900))


def test_a_plan_for_a_slow_link_is_faster_there():
    near = Situation(num_stages=4, seconds=attention, num_microbatches=4)
    far = replace(near, link_seconds=2e-2)
    there, here = PLANNED.slices(1024, far), PLANNED.slices(1024, near)
    assert far.step_seconds(there) < far.step_seconds(here)
    assert near.step_seconds(here) < near.step_seconds(there)


def test_what_the_error_hides_is_cut_into_fewer_slices():
    exact = Situation(num_stages=4, seconds=attention)
    rough = replace(exact, error=0.05)
    many, few = PLANNED.slices(1024, exact), PLANNED.slices(1024, rough)
    assert len(few) < len(many)
    assert exact.step_seconds(few) <= 1.05 * exact.step_seconds(many)
    fewer = [equal(1024, n, granularity=32) for n in range(1, len(few))]
    assert all(exact.step_seconds(slices) > 1.05 * exact.step_seconds(many) for slices in fewer)


def test_with_several_microbatches_fewer_slices_would_hold_more():
    """(P - 1 + S) / S sequences: so none but the fastest are taken, however rough the costs."""
    exact = Situation(num_stages=4, seconds=attention, num_microbatches=8)
    many, few = (PLANNED.slices(1024, replace(exact, error=error)) for error in (0.0, 0.05))
    assert exact.held(few) <= exact.held(many)
    assert exact.held(equal(1024, 2)) > exact.held(many)


SITUATION = Situation(num_stages=2, seconds=attention)


@pytest.mark.parametrize("slicing", [Uniform(), Uniform(5), Balanced(4), Planned(), Given((100, 30))])
def test_every_slicing_cuts_the_whole_length(slicing):
    slices = slicing.slices(130, SITUATION)
    assert sum(slices) == 130
    assert min(slices) >= 1


def test_uniform_and_balanced_lengths():
    assert Uniform(4).slices(10, SITUATION) == (3, 3, 2, 2)
    found = costs(Balanced(4, granularity=1).slices(400, SITUATION), attention)
    assert max(found) / min(found) < 1.02


@pytest.mark.parametrize(("make", "words"), [
    (lambda: plan(0, 2, attention), "length_tokens must be at least 1, got 0"),
    (lambda: plan(8, 0, attention), "num_stages must be at least 1"),
    (lambda: plan(8, 2, attention, granularity=0), "granularity must be at least 1"),
    (lambda: plan(8, 2, attention, max_slices=0), "max_slices must be at least 1"),
    (lambda: plan(8, 2, lambda i, j: 0.0), r"seconds\(\d, \d\) must be positive and finite, got 0.0"),
    (lambda: balance(8, 9, attention), "8 tokens are 8 pieces of 1, fewer than 9 slices: ask for fewer"),
    (lambda: Uniform(0), "n must be at least 1"),
    (lambda: Uniform(9).slices(8, SITUATION), "8 tokens can't be cut into 9 slices"),
    (lambda: Given(()), "lengths must be positive"),
    (lambda: Given((4, 5)).slices(8, SITUATION), r"\(4, 5\) sum to 9, but the sequence has 8 tokens: give"),
])  # fmt: skip
def test_what_cannot_be_is_said(make, words):
    with pytest.raises(ValueError, match=words):
        make()
