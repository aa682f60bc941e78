"""What is measured by real steps: costs that are known come out of steps that have them, and a step's sum is right."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import transformers

from lightning_decentral.pipeline import ExactActivations, Keep, OneForwardOneBackward, Planned, ZeroBubble
from lightning_decentral.pipeline.compute.causal.trial import adapted
from lightning_decentral.pipeline.compute.model import Call, StagePlace
from lightning_decentral.pipeline.plan.cost import (
    CostModel,
    Link,
    StageCost,
    action_seconds,
    expected,
    message_seconds,
    priced,
    through,
)
from lightning_decentral.pipeline.plan.schedule import halved, tasks
from lightning_decentral.pipeline.plan.slicing import equal
from lightning_decentral.pipeline.wire import slice_planner as measure
from lightning_decentral.pipeline.wire.slice_planner import COUNTS, MeasuredSteps, fitted, ping, profile
from lightning_decentral.pipeline.wire.stage_runner import StageRunner
from lightning_decentral.shared.plan.timeline import makespan, run
from lightning_decentral.shared.wire.transport import GlooTransport
from tests.pipeline.causal import GPT2, built, edges
from tests.world import world

LENGTH = 512
COSTS = CostModel(tuple((i, 1e-3 + 1e-5 * i) for i in (32, 64, 128, 256, 512)), (2e-4, 1e-6, 1e-7, 1e-9))


def times(costs, factor):
    """factor * t."""
    alone, coefficients = ([(n, factor * s) for n, s in costs.alone], [factor * a for a in costs.coefficients])
    return CostModel(tuple(alone), tuple(coefficients), costs.error)


KNOWN = (
    StageCost(COSTS, times(COSTS, 2), link=Link(2e-4, 1e-6)),
    StageCost(times(COSTS, 1.5), times(COSTS, 2.5), 4e-3),
)
PLANNED = Planned(granularity=32)
CHUNKS = [(512, 0), (256, 256), (200, 0), (100, 40), (32, 480)]


def steps(schedule, num_slices, stretch, profiles=KNOWN):
    """Steps of chunks that cost what is known, `stretch` times that by the clock; messages as they are."""
    slices = equal(LENGTH, num_slices)
    costs = partial(action_seconds, profiles, slices)
    costs = halved(costs) if schedule.splits else costs
    link = partial(message_seconds, [profile.link for profile in profiles], slices)
    own = {action: costs(action) for stage in schedule.actions(2, 1, num_slices) for action in stage}
    seconds = makespan(run(tasks(schedule.actions(2, 1, num_slices), num_slices, scaled(costs, stretch), link)))
    return MeasuredSteps(slices, seconds, own, profiles[1].loss_seconds)


def scaled(costs, factor):
    return lambda action: factor * costs(action)


@pytest.mark.sampled
@pytest.mark.parametrize("stretch", [1.0, 1.25])
@pytest.mark.parametrize("schedule", [OneForwardOneBackward(), ZeroBubble()], ids=lambda s: type(s).__name__)
def test_known_costs_are_recovered(schedule, stretch):
    measured = [steps(schedule, n, stretch) for n in COUNTS]
    for stage, known in enumerate(KNOWN):
        found = fitted(measured, schedule, stage, [profile.link for profile in KNOWN])
        assert found.link == known.link
        assert found.stretch == pytest.approx(stretch)
        assert found.loss_seconds == pytest.approx(stretch * known.loss_seconds)
        for chunk in CHUNKS:
            assert found.forward(*chunk) == pytest.approx(stretch * known.forward(*chunk), rel=1e-6)
            assert found.backward(*chunk) == pytest.approx(stretch * known.backward(*chunk), rel=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("num_slices", COUNTS)
def test_the_forecast_of_a_measured_step_is_what_was_measured(num_slices):
    """Also where the clock is no multiple of the parts: messages are as long as they were measured."""
    schedule = OneForwardOneBackward()
    measured = [replace(s, seconds=1.3 * s.seconds) for s in far_steps()]
    links = [replace(KNOWN[0].link, latency_seconds=2e-3), Link()]
    found = [fitted(measured, schedule, stage, links) for stage in range(2)]
    (step,) = [s.seconds for s in measured if len(s.slices) == num_slices]
    assert expected(found, schedule, 1, equal(LENGTH, num_slices)).seconds == pytest.approx(step, rel=1e-3)


def far_steps():
    """Steps over a link that is a considerable part of them."""
    known = (replace(KNOWN[0], link=replace(KNOWN[0].link, latency_seconds=2e-3)), KNOWN[1])
    return [steps(OneForwardOneBackward(), n, 1.0, known) for n in COUNTS]


def test_a_step_is_the_sum_of_its_longest_way():
    """Written out: stage 1 is slower and the first slice longer: stage 0's second chunk hides behind it both ways."""
    a, b = (412, 0), (100, 412)
    first, second = KNOWN
    link = first.link
    there = first.forward(*a) + link(412) + second.forward(*a) + second.forward(*b) + second.loss_seconds
    back = second.backward(*b) + second.backward(*a) + link(412) + first.backward(*a)
    assert link(412) == pytest.approx(6.12e-4)
    assert expected(KNOWN, OneForwardOneBackward(), 1, (412, 100)).seconds == pytest.approx(there + back)


@pytest.mark.sampled
@pytest.mark.parametrize("num_microbatches", [1, 2, 8])
def test_no_equal_slices_are_expected_to_be_faster_than_the_planned_ones(num_microbatches):
    situation = priced(KNOWN, OneForwardOneBackward(), num_microbatches)
    planned = situation.step_seconds(PLANNED.slices(LENGTH, situation))
    assert planned <= min(situation.step_seconds(equal(LENGTH, n)) for n in range(1, 17))


def test_a_fit_that_costs_nothing_does_not_blur_the_plan():
    """As of a stage that is frozen: its backward is over at once, and nothing but noise."""
    nothing = replace(times(COSTS, 1e-6), error=1.0)
    exact = replace(COSTS, error=0.03)
    frozen = priced((StageCost(exact, nothing), StageCost(exact, exact)), OneForwardOneBackward(), 1)
    assert frozen.error == pytest.approx(0.03 / 3**0.5, rel=1e-3)


@pytest.mark.thorough
def test_slices_that_cannot_be_told_apart_do_not_hold_more():
    """Four stages, 16 micro-batches: few slices are as fast within the error, and hold more of a sequence."""
    costs = replace(COSTS, alone=tuple((i, 1e-5 * i) for i in (32, 512)), coefficients=(0.0,) * 4, error=0.5)
    situation = priced([StageCost(costs, costs)] * 4, OneForwardOneBackward(), 16)
    fastest = PLANNED.slices(LENGTH, replace(situation, error=0.0))
    assert situation.held(PLANNED.slices(LENGTH, situation)) <= situation.held(fastest)
    assert situation.held(equal(LENGTH, 2)) > situation.held(fastest)


def test_many_microbatches_want_fewer_slices():
    found = [PLANNED.slices(LENGTH, priced(KNOWN, OneForwardOneBackward(), m)) for m in (1, 8)]
    assert len(found[1]) < len(found[0])


def test_a_line_through_two_messages():
    assert through((10, 3e-3), (110, 5e-3)) == pytest.approx(Link(2.8e-3, 2e-5))
    assert through((10, 3e-3), (110, 2e-3)) == Link(3e-3, 0.0)  # disturbed: no message gets faster by being longer
    assert through((10, 1e-3), (110, 2e-2)) == Link(0.0, pytest.approx(1.9e-4))


OPTIONS = {
    "schedule": OneForwardOneBackward(),
    "activations": Keep(),
    "boundary": ExactActivations(),
    "device": torch.device("cpu"),
}


def alone(model):
    return StageRunner(model, StagePlace(0, 4, True, True), None, {}, **OPTIONS)


def stage_of_two(group, transport=GlooTransport):
    over, rank, model = transport(group), group.rank(), adapted(built("llama", torch.float32))
    place = StagePlace(2 * rank, 2 * rank + 2, rank == 0, rank == 1)
    model.keep(place)
    return StageRunner(model, place, over, edges(over), **OPTIONS)


CALL = Call(torch.zeros(2, 32, dtype=torch.int64))


@pytest.mark.threads
def test_stages_measure_together_and_leave_nothing_behind():
    def worker(group):
        pipe = stage_of_two(group)
        found = profile(pipe, CALL)
        return found, [p.grad for p in pipe.model.module.parameters() if p.grad is not None]

    (first, second), gradients = zip(*world(2, worker), strict=True)
    assert gradients == ([], [])
    assert (first.loss_seconds, second.link) == (0.0, Link())
    assert second.loss_seconds > 0
    assert first.link(32) > 0
    assert expected((first, second), OneForwardOneBackward(), 1, (16, 16)).seconds > 0


@pytest.mark.thorough
def test_dropout_draws_afterwards_what_it_would_have_drawn():
    config = transformers.GPT2Config(**{**GPT2, "resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3})
    pipe = alone(adapted(transformers.GPT2LMHeadModel(config).train()))
    before = torch.get_rng_state()
    profile(pipe, CALL)
    assert torch.equal(torch.get_rng_state(), before)


class Slow(GlooTransport):
    """Every message takes 4 ms to leave, on a clock that both workers read and that nothing else moves."""

    now = 0.0

    def exchange(self, sends, receives):
        Slow.now += 4e-3 * len(sends)
        return super().exchange(sends, receives)


@pytest.mark.threads
def test_a_slow_message_is_seen(monkeypatch):
    monkeypatch.setattr(measure, "clock", lambda device: lambda: Slow.now)
    first, second = world(2, lambda group: ping(stage_of_two(group, Slow), CALL))
    assert second == Link()
    assert (first(2), first(32)) == (pytest.approx(4e-3), pytest.approx(4e-3))


def test_a_short_sequence_is_refused():
    with pytest.raises(ValueError, match="15 tokens are too few to measure slices of"):
        profile(alone(adapted(built("llama"))), Call(torch.zeros(1, 15, dtype=torch.int64)))
