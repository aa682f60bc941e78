"""LAW: matrices that Muon shares out over devices are those of one process, in any order in which streams may run."""

import copy
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_decentral.compressed.strategy import Owners
from lightning_decentral.optim import Muon, muon_groups
from lightning_decentral.shared.compute.codec import BFloat16, Codec, Plain
from lightning_decentral.shared.wire.averaging.gradient_average import GradientAverage
from lightning_decentral.shared.wire.compressed_mean import mean_by
from tests.simulated import CUDA, Engine
from tests.simulated.streams import Event, Stream
from tests.simulated.wire import Make, device_world, losses_read, sent_overwritten, without_waiting

pytestmark = pytest.mark.threads
SIZE, STEPS = 3, 3
NET = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))


def muon(model: nn.Module) -> Muon:
    return Muon(muon_groups(model), lr=0.05, dtype="float32")


def rows(rank: int) -> Tensor:
    return torch.randn(STEPS, 4, 6, generator=torch.Generator().manual_seed(rank))


def trained(codec: Codec, make: Make, engine: Engine) -> list[Tensor]:
    model, given = copy.deepcopy(NET).to(CUDA), rows(make.hosts.rank).to(CUDA)
    optimizer = muon(model)
    owners = Owners([optimizer], codec, make(), lambda call: call())
    average = GradientAverage(mean_by(Plain(), make, CUDA), make.hosts, lambda call: call(), 512)
    average.watch(list(model.parameters()))
    for x in given:
        with without_waiting(engine):
            optimizer.zero_grad()
            average.begin()
            model(x).square().mean().backward()
            average.finish()
            optimizer.step()
    owners.close()
    return [p.detach().cpu() for p in model.parameters()]


def train(codec: Codec, seed: int, error: float = 1e-4) -> None:
    """AssertionError where replicas aren't equal, or not what one process makes of all data."""
    model = copy.deepcopy(NET)
    optimizer = muon(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        torch.stack([model(rows(rank)[step]).square().mean() for rank in range(SIZE)]).mean().backward()
        optimizer.step()
    first, *others = device_world(SIZE, partial(trained, codec), seed)
    for other in others:
        assert all(map(torch.equal, first, other))
    for a, b in zip(first, model.parameters(), strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=error, atol=error)


@pytest.mark.parametrize(("codec", "error"), [(Plain(), 1e-4), (BFloat16(), 1e-2)], ids=str)
def test_devices_that_share_matrices_out_train_as_one_process(codec: Codec, error: float) -> None:
    """No host waits in a step."""
    train(codec, seed=1, error=error)


PLANTS: dict[str, Any] = {
    "sent too early": lambda: mock.patch.object(Stream, "wait_stream"),
    "used too early": lambda: mock.patch.object(Event, "wait"),
    "overwritten too early": sent_overwritten,
    "read by the host": losses_read,
}


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_defect_is_seen(name: str) -> None:
    plant: AbstractContextManager[Any] = PLANTS[name]()
    with plant, pytest.raises((AssertionError, RuntimeError)):
        train(Plain(), seed=0)
