"""Schedules against torch's own and against their formulas."""

import math

import pytest
import torch
from torch.optim import SGD, lr_scheduler
from torch.optim.lr_scheduler import CosineAnnealingLR

from lightning_decentral.recipes import schedules

STEPS = 40


def rates(make):
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler, found = make(optimizer), []
    for _ in range(STEPS):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(("ours", "torchs"), [
    (lambda o: schedules.constant(o, STEPS), lambda o: lr_scheduler.ConstantLR(o, factor=1.0)),
    (lambda o: schedules.cosine(o, STEPS, warmup=0, floor=0.1), lambda o: CosineAnnealingLR(o, STEPS, 0.1)),
    (lambda o: schedules.linear(o, STEPS, warmup=0, floor=0.2), lambda o: lr_scheduler.LinearLR(o, 1.0, 0.2, STEPS)),
    (lambda o: schedules.milestones(o, STEPS, at=(0.25, 0.5)), lambda o: lr_scheduler.MultiStepLR(o, [10, 20])),
])  # fmt: skip
def test_equals_torchs(ours, torchs):
    assert rates(ours) == pytest.approx(rates(torchs))


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "inverse_sqrt", "milestones"])
def test_warmup_rises_in_equal_parts_to_the_full_rate(name):
    found = rates(lambda o: getattr(schedules, name)(o, STEPS, warmup=0.25))
    assert found[:11] == pytest.approx([(step + 1) / 11 for step in range(11)])
    assert max(found) == pytest.approx(1.0)


def test_inverse_sqrt_is_the_root_of_the_steps():
    found = rates(lambda o: schedules.inverse_sqrt(o, STEPS, warmup=0.1))
    assert found[4:] == pytest.approx([math.sqrt(4 / step) for step in range(4, STEPS)])


@pytest.mark.parametrize("warmup", [-0.1, 1, 500])
def test_warmup_in_steps_is_refused(warmup):
    with pytest.raises(ValueError, match=f"fraction of all steps, got {warmup}"):
        rates(lambda o: schedules.cosine(o, STEPS, warmup=warmup))


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "inverse_sqrt", "milestones"])
def test_momentum_rises_beside_the_rate(name):
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=1.0, momentum=0.95)
    scheduler, found = getattr(schedules, name)(optimizer, STEPS, momentum_start=0.8), []
    for _ in range(STEPS + 1):
        found.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        optimizer.step()
        scheduler.step()
    assert [momentum for _, momentum in found] == pytest.approx([0.8 + 0.15 * t / STEPS for t in range(STEPS + 1)])
    assert [rate for rate, _ in found[:STEPS]] == rates(lambda o: getattr(schedules, name)(o, STEPS))
