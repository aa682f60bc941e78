"""One Fabric that sets up several models one after the other, the same one again, or another optimizer for it."""

from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.optim import SGD

from lightning_decentral.gossip import Combine, Complete, FabricGossipStrategy, Gossip, PushSum, Ring
from tests.tiny import in_processes


def train(fabric: Fabric, model: Any, optimizer: Any, steps: int, pull: float = 1.0) -> None:
    """Towards another point on each worker; with no pull the workers only mix."""
    for _ in range(steps):
        optimizer.zero_grad()
        fabric.backward(pull * (model(torch.eye(3)) - fabric.global_rank).square().mean())
        optimizer.step()


def far(fabric: Fabric, module: nn.Module) -> float:
    rows = fabric.strategy.gather([p.tolist() for p in module.parameters()])
    flats = torch.stack([torch.cat([torch.tensor(p).flatten() for p in row]) for row in rows])
    return float((flats - flats[0]).abs().max())


def other_models(fabric: Fabric) -> list[float]:
    found = []
    for _ in range(2):
        torch.manual_seed(fabric.global_rank)
        network = nn.Linear(3, 2)
        model, optimizer = fabric.setup(network, SGD(network.parameters(), lr=0.1))
        found.append(far(fabric, network))
        train(fabric, model, optimizer, 3)
        train(fabric, model, optimizer, 40, 0.0)
        found.append(far(fabric, network))
    return found


def another_optimizer(fabric: Fabric) -> list[float]:
    """The second begins where the first has stopped; then the first again."""
    network = nn.Linear(3, 2)
    model, first = fabric.setup(network, SGD(network.parameters(), lr=0.1))
    train(fabric, model, first, 3)
    second = fabric.setup_optimizers(SGD(network.parameters(), lr=0.2))
    found = []
    for optimizer in (second, first):
        train(fabric, model, optimizer, 3)
        train(fabric, model, optimizer, 40, 0.0)
        found.append(far(fabric, network))
    return found


def the_same_again(fabric: Fabric) -> list[float]:
    """Set up while the workers are apart: they begin at their mean, and the rule with them."""
    network = nn.Linear(3, 2)
    model, optimizer = fabric.setup(network, SGD(network.parameters(), lr=0.1))
    train(fabric, model, optimizer, 5)
    with fabric.strategy.mean():
        mean = [p.detach().clone() for p in network.parameters()]
    model, optimizer = fabric.setup(network, SGD(network.parameters(), lr=0.1))
    moved = max(float((p - was).abs().max()) for p, was in zip(network.parameters(), mean, strict=True))
    found = [moved, far(fabric, network)]
    train(fabric, model, optimizer, 3)
    train(fabric, model, optimizer, 40, 0.0)
    return [*found, far(fabric, network)]


def launched(loop: Any, rule: Combine, delay: int) -> Any:
    topology = Complete() if delay == 0 else Ring()
    options = {"topology": topology, "combine": rule, "delay": delay}
    fabric = Fabric(accelerator="cpu", devices=3, strategy=FabricGossipStrategy(start_method="fork", **options))
    return fabric.launch(loop)


@pytest.mark.sampled
@pytest.mark.parametrize(("rule", "delay"), [(Gossip(), 0), (Gossip(rate=0.5), 1), (PushSum(), 0)], ids=str)
@pytest.mark.parametrize("loop", [other_models, another_optimizer, the_same_again])
def test_workers_mix_what_is_trained_now(loop: Any, rule: Combine, delay: int) -> None:
    slack = 1e-5 if delay == 0 else 1e-3
    found = in_processes(launched, loop, rule, delay)
    assert max(found) < (slack if loop is not the_same_again else 0.1), found
    assert max(found[1:]) < slack, found


def past(fabric: Fabric) -> None:
    """Steps the optimizer that Fabric was given."""
    network = nn.Linear(3, 2)
    bare = SGD(network.parameters(), lr=0.1)
    model, _ = fabric.setup(network, bare)
    train(fabric, model, bare, 1)


def test_an_optimizer_that_steps_past_the_strategy_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"SGD stepped past the strategy.*step what fabric.setup returned"):
        in_processes(launched, past, Gossip(), 0)
