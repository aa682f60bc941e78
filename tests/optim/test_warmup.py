"""Momentum warm-up: the formula, beside another schedule, and resume bit for bit."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, CosineAnnealingLR, LRScheduler

from lightning_decentral.optim import MomentumWarmup, Muon, muon_groups

STEPS = 10
Make = Callable[[nn.Module], Optimizer]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2))


def muon(module: nn.Module) -> Optimizer:
    return Muon(muon_groups(module, adamw=["2.*"]), lr=0.05, momentum=0.95)


def sgd(module: nn.Module) -> Optimizer:
    return SGD(module.parameters(), lr=0.05, momentum=0.95)


def schedules(optimizer: Optimizer) -> LRScheduler:
    return ChainedScheduler([CosineAnnealingLR(optimizer, 2 * STEPS), MomentumWarmup(optimizer, STEPS, 0.8)])


def train(module: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, steps: int, first: int = 0) -> list[Any]:
    """(learning rate, momentum) of each step."""
    found = []
    for step in range(first, first + steps):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        module(x).square().mean().backward()
        found.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("make", [muon, sgd])
def test_momentum_rises_to_the_optimizers_own_and_stays(make: Make) -> None:
    module = net()
    optimizer = make(module)
    found = train(module, optimizer, schedules(optimizer), STEPS + 5)
    assert [m for _, m in found] == pytest.approx([0.8 + 0.15 * min(1, t / STEPS) for t in range(STEPS + 5)])


def test_the_learning_rate_is_that_of_the_schedule_beside_it() -> None:
    beside, alone = net(), net()
    optimizer, other = muon(beside), muon(alone)
    found = train(beside, optimizer, schedules(optimizer), STEPS)
    expected = train(alone, other, CosineAnnealingLR(other, 2 * STEPS), STEPS)
    assert [rate for rate, _ in found] == [rate for rate, _ in expected]
    assert not torch.equal(beside[1].weight, alone[1].weight), "another momentum, other steps"


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.8])
def test_groups_that_ask_for_less_than_the_start_keep_it(momentum: float) -> None:
    module = net()
    groups = [{"params": module[0].parameters()}, {"params": module[1].parameters(), "momentum": momentum}]
    optimizer = SGD(groups, lr=0.05, momentum=0.95)
    scheduler, found = MomentumWarmup(optimizer, STEPS), []
    for _ in range(STEPS + 2):
        found.append([group["momentum"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    rising = [0.8 + 0.15 * min(1, t / STEPS) for t in range(STEPS + 2)]
    assert [first for first, _ in found] == pytest.approx(rising)
    assert [second for _, second in found] == [momentum] * (STEPS + 2)


@pytest.mark.parametrize("make", [muon, sgd])
def test_a_resumed_training_goes_on_bit_for_bit(make: Make) -> None:
    whole, first = net(), net()
    optimizer = make(whole)
    train(whole, optimizer, schedules(optimizer), STEPS)
    optimizer = make(first)
    scheduler = schedules(optimizer)
    train(first, optimizer, scheduler, 4)
    second = net()
    second.load_state_dict(first.state_dict())
    resumed = make(second)
    going_on = schedules(resumed)
    resumed.load_state_dict(optimizer.state_dict())
    going_on.load_state_dict(scheduler.state_dict())
    train(second, resumed, going_on, STEPS - 4, 4)
    for a, b in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("make", "arguments", "message"), [
    (sgd, (10, 1.0), "start must be in [0, 1), got 1.0: 0.8 is usual under gossip"),
    (sgd, (10, -0.1), "start must be in [0, 1), got -0.1"),
    (sgd, (0,), "steps must be at least 1, got 0: give those of the training"),
    (lambda module: SGD(module.parameters(), lr=0.05, momentum=0.5), (10,),
     "the momentum of SGD is 0.5 and can't rise from start=0.8: give a lower start or a larger momentum"),
    (lambda module: Adam(module.parameters()), (10,), "Adam has no momentum that could rise: take Muon or SGD"),
])  # fmt: skip
def test_what_cannot_be_is_said(make: Make, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        MomentumWarmup(make(net()), *arguments)
