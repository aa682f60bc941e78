"""What one worker alone sets up, thaws or adds in the middle of a loop of its own: named on all within seconds."""

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_decentral.compressed.fabric import FabricCompressedStrategy
from lightning_decentral.gossip.fabric import FabricGossipStrategy
from lightning_decentral.partial.fabric import FabricPartialBackpropStrategy
from tests.crew import crew

TIMEOUT = timedelta(seconds=30)
STRATEGIES: dict[str, Callable[[], Any]] = {
    "gossip": lambda: FabricGossipStrategy(timeout=TIMEOUT),
    "compressed": lambda: FabricCompressedStrategy(timeout=TIMEOUT),
    "partial": lambda: FabricPartialBackpropStrategy(cuts=["2"], timeout=TIMEOUT),
}
Optimizer = torch.optim.Optimizer


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def thaw(fabric: Fabric, net: nn.Module, optimizer: Optimizer) -> Optimizer:
    net[1].requires_grad_(True)
    return optimizer


def freeze(fabric: Fabric, net: nn.Module, optimizer: Optimizer) -> Optimizer:
    net[3].requires_grad_(False)
    return optimizer


def replace(fabric: Fabric, net: nn.Module, optimizer: Optimizer) -> Optimizer:
    return fabric.setup_optimizers(sgd(net.parameters()))


def another(fabric: Fabric, net: nn.Module, optimizer: Optimizer) -> Optimizer:
    fabric.setup_module(nn.Linear(2, 2))
    return optimizer


CHANGES = {"thaw": thaw, "freeze": freeze, "replace": replace, "another": another}


def train(strategy: str, change: str, ranks: tuple[int, ...]) -> list[float]:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=STRATEGIES[strategy]())
    fabric.launch()
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    net[1].requires_grad_(False)
    model, optimizer = fabric.setup(net, sgd(net.parameters()))
    for step in range(4):
        if step == 2 and fabric.global_rank in ranks:
            optimizer = CHANGES[change](fabric, net, optimizer)
        torch.manual_seed(10 * fabric.global_rank + step)
        optimizer.zero_grad()
        fabric.backward(model(torch.randn(4, 4)).square().mean())
        optimizer.step()
    fabric.strategy.finish()
    return torch.cat([p.detach().flatten() for p in net.parameters()]).tolist()


CASES = [
    (
        "gossip",
        "thaw",
        1,
        r"has 0.1.weight .*, mixed after updates of optimizer 0 where worker 0 .* not mixed",
    ),
    ("gossip", "replace", 0, r"has set-up 2 SGD where worker 1 has no set-up 2"),
    ("compressed", "thaw", 0, r"has 1.weight \(4, 4\) torch.float32, trained where worker 1 has .*, frozen"),
    ("compressed", "another", 1, r"has set-up 2 Linear where worker 0 has no set-up 2"),
    ("partial", "freeze", 1, r"has 3.weight \(4, 4\) torch.float32, frozen where worker 0 has .*, trained"),
    ("partial", "replace", 1, r"has set-up 2 SGD where worker 0 has no set-up 2"),
]


@pytest.mark.parametrize(("strategy", "change", "rank", "words"), CASES, ids=lambda value: str(value)[:12])
def test_a_lone_change_ends_all_within_seconds_by_name(strategy: str, change: str, rank: int, words: str) -> None:
    outcomes = crew(2, train, strategy, change, (rank,), seconds=40)
    lone, other = outcomes[rank].error, outcomes[1 - rank].error
    assert re.match(f"RuntimeError: worker {rank} {words}", lone), lone
    assert re.search(f"worker {rank} ended: RuntimeError: worker {rank} {words}", other), other
    assert max(outcome.seconds for outcome in outcomes) < TIMEOUT.total_seconds() / 2


@pytest.mark.parametrize(("strategy", "change"), [("gossip", "replace"), ("compressed", "thaw"), ("partial", "freeze")])
def test_on_all_workers_the_same_change_goes_on(strategy: str, change: str) -> None:
    one, two = crew(2, train, strategy, change, (0, 1), seconds=40)
    assert not one.error, one.error
    assert one.value == two.value
