"""What is measured by real steps: costs that are known come out of steps that have them, and a step's sum is right."""

import time
from functools import partial

import pytest
import torch
import transformers

from lightning_decentral.pipeline.boundary import Exact
from lightning_decentral.pipeline.causal import CausalModel
from lightning_decentral.pipeline.cost import CostModel
from lightning_decentral.pipeline.forecast import halved
from lightning_decentral.pipeline.models import Call, Place
from lightning_decentral.pipeline.ping import ping
from lightning_decentral.pipeline.pipe import Pipe
from lightning_decentral.pipeline.profile import Link, Profile, action_seconds, expected, priced, through
from lightning_decentral.pipeline.schedule import OneForwardOneBackward, ZeroBubble
from lightning_decentral.pipeline.slicing import Planned, equal
from lightning_decentral.pipeline.stage import Keep
from lightning_decentral.pipeline.timing import COUNTS, Step, Steps, fitted, profile
from lightning_decentral.transport import GlooTransport
from tests.pipeline.causal import GPT2, built
from tests.world import world

LENGTH = 512
COSTS = CostModel(tuple((i, 1e-3 + 1e-5 * i) for i in (32, 64, 128, 256, 512)), (2e-4, 1e-6, 1e-7, 1e-9))
KNOWN = (Profile(COSTS, COSTS.times(2), link=Link(2e-4, 1e-6)), Profile(COSTS.times(1.5), COSTS.times(2.5), 4e-3))
PLANNED = Planned(granularity=32)
CHUNKS = [(512, 0), (256, 256), (200, 0), (100, 40), (32, 480)]


def steps(schedule, num_slices, stretch):
    """Steps that cost what is known, on a machine whose clock goes `stretch` times as fast as its processors' time."""
    slices = equal(LENGTH, num_slices)
    costs = partial(action_seconds, KNOWN, slices)
    costs = halved(costs) if schedule.splits else costs
    own = {action: costs(action) for stage in schedule.actions(2, 1, num_slices) for action in stage}
    return Steps(slices, [Step(stretch * expected(KNOWN, schedule, 1, slices).seconds, own, KNOWN[1].loss_seconds)] * 3)


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


def test_a_step_is_the_sum_of_its_longest_way():
    """Written out: stage 1 is slower and the first slice longer: stage 0's second chunk hides behind it both ways."""
    a, b = (412, 0), (100, 412)
    first, second = KNOWN
    link = first.link
    there = first.forward(*a) + link(412) + second.forward(*a) + second.forward(*b) + second.loss_seconds
    back = second.backward(*b) + second.backward(*a) + link(412) + first.backward(*a)
    assert link(412) == pytest.approx(6.12e-4)
    assert expected(KNOWN, OneForwardOneBackward(), 1, (412, 100)).seconds == pytest.approx(there + back)


@pytest.mark.parametrize("num_microbatches", [1, 2, 8])
def test_no_equal_slices_are_expected_to_be_faster_than_the_planned_ones(num_microbatches):
    situation = priced(KNOWN, OneForwardOneBackward(), num_microbatches)
    planned = situation.step_seconds(PLANNED.slices(LENGTH, situation))
    assert planned <= min(situation.step_seconds(equal(LENGTH, n)) for n in range(1, 17))


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
    "boundary": Exact(),
    "device": torch.device("cpu"),
}


def alone(model):
    return Pipe(model, Place(0, 4, True, True), None, None, **OPTIONS)


def stage_of_two(group, transport=GlooTransport):
    over, rank, model = transport(group), group.rank(), CausalModel(built("llama", torch.float32))
    place = Place(2 * rank, 2 * rank + 2, rank == 0, rank == 1)
    model.keep(place)
    return Pipe(model, place, over, over, **OPTIONS)


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


def test_dropout_draws_afterwards_what_it_would_have_drawn():
    config = transformers.GPT2Config(**{**GPT2, "resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3})
    pipe = alone(CausalModel(transformers.GPT2LMHeadModel(config).train()))
    before = torch.get_rng_state()
    profile(pipe, CALL)
    assert torch.equal(torch.get_rng_state(), before)


class Slow(GlooTransport):
    """Every message takes 4 ms to leave."""

    def exchange(self, sends, receives):
        time.sleep(4e-3 * len(sends))
        return super().exchange(sends, receives)


@pytest.mark.threads
def test_a_slow_message_is_seen():
    first, second = world(2, lambda group: ping(stage_of_two(group, Slow), CALL))
    assert second == Link()
    assert first(2) >= 4e-3
    assert first(32) >= 4e-3


def test_a_short_sequence_is_refused():
    with pytest.raises(ValueError, match="15 tokens are too few to measure slices of"):
        profile(alone(CausalModel(built("llama"))), Call(torch.zeros(1, 15, dtype=torch.int64)))
