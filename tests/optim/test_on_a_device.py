"""On a (simulated) device optimizers make the steps that they make on the host, and no host waits for one."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_decentral.optim import AccumAdam, AccumAdamW, Muon, muon_groups
from tests import simulated
from tests.simulated import CUDA

Make = Callable[[nn.Module], Optimizer]
MAKES: dict[str, Make] = {
    "AccumAdam": lambda model: AccumAdam(model.parameters(), lr=1e-2),
    "AccumAdamW": lambda model: AccumAdamW(model.parameters(), lr=1e-2, window=2),
    "Muon": lambda model: Muon(muon_groups(model), lr=1e-2, dtype="float32"),
}


def trained(make: Make, device: torch.device) -> list[Tensor]:
    """Parameters after five steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4)).to(device)
    optimizer, rows = make(model), torch.randn(5, 3, 6).to(device)
    engine = simulated.here()
    before = len(engine.waits) if engine else 0
    for row in rows:
        optimizer.zero_grad()
        model(row).square().mean().backward()
        optimizer.step()
    assert engine is None or engine.waits[before:] == []
    return [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize("name", MAKES)
def test_steps_are_those_of_the_host(name: str) -> None:
    with simulated.device(0):
        there = trained(MAKES[name], CUDA)
    for a, b in zip(there, trained(MAKES[name], torch.device("cpu")), strict=True):
        torch.testing.assert_close(a, b)
