"""Workers on a device, simulated here, have what those on the host have, in any order in which its stream may run."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_decentral import GossipStrategy
from lightning_decentral.compressed import CompressedStrategy
from lightning_decentral.gossip import DifferenceCompression, Int8, Ring
from lightning_decentral.planner.rehearsal import rehearse
from lightning_decentral.planner.rehearsal.crew import Crew
from lightning_decentral.planner.rehearsal.evaluation import HeldOutEvaluation
from lightning_decentral.planner.rehearsal.loop_settings import CPU, LoopSettings
from tests import simulated
from tests.simulated import CUDA, Engine, streams

STEPS, WORKERS = 3, 3


class Layers(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 8)).double()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.net(batch) - batch.flip(1)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Plain(LightningModule):
    """Least squares."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return (self.layer(x) - y).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layer.parameters(), lr=0.02)


def loader(examples: int = 24) -> DataLoader[Any]:
    x = torch.randn(examples, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)


@contextmanager
def one_device(seed: int) -> Iterator[Engine]:
    """That all threads of this process queue to, one at a time."""
    step, turn = Engine.step, threading.RLock()

    def alone(engine: Engine) -> bool:
        with turn:
            return step(engine)

    shared = mock.patch.object(streams, "_here", SimpleNamespace())
    with shared, mock.patch.object(Engine, "step", alone), simulated.device(seed) as engine:
        yield engine


def trained(strategy: Strategy, device: torch.device) -> tuple[list[dict[str, Tensor]], float]:
    """(the workers' parameters, the loss of their mean)."""
    rows = [list(torch.randn(STEPS, 4, 8, generator=torch.Generator().manual_seed(k)).double()) for k in range(WORKERS)]
    loop = LoopSettings(clip=0.5, device=device)
    with Crew(Layers(), lambda rank: iter(rows[rank]), strategy, WORKERS, STEPS, loop=loop) as crew:
        crew.train(STEPS)
        loss = HeldOutEvaluation(Layers(), rows[0], device).loss([worker.module for worker in crew.workers])
        assert {p.device.type for worker in crew.workers for p in worker.module.parameters()} == {device.type}
        found = [{k: v.detach().cpu() for k, v in w.module.state_dict().items()} for w in crew.workers]
        crew.release()
    return found, loss


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (GossipStrategy, {"topology": Ring()}),
        (GossipStrategy, {"topology": Ring(), "delay": 0}),
        (GossipStrategy, {"topology": Ring(), "codec": DifferenceCompression(Int8())}),
        (CompressedStrategy, {}),
        (DDPStrategy, {}),
    ],
)
def test_workers_of_a_device_equal_those_of_the_host(kind: type[Strategy], options: dict[str, Any], seed: int) -> None:
    with one_device(seed):
        found, loss = trained(kind(**options), CUDA)
    expected, there = trained(kind(**options), CPU)
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-9)
    assert loss == pytest.approx(there)


@pytest.mark.parametrize(("device", "why"), [("cuda", "no CUDA device here"), ("mps", "must be cpu or cuda")])
def test_a_device_that_isnt_there_is_refused(device: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_decentral.shared.compute.cuda.device_count", lambda: 0)
    with pytest.raises(ValueError, match=why):
        rehearse(Plain(), loader(), workers=[2], target=0.0, validation=loader(8), device=device)


def test_workers_that_memory_doesnt_hold_are_said() -> None:
    class Large(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.training:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().training_step(batch, batch_idx)

    found = rehearse(Large(), loader(), workers=[2], target=0.0, steps=10, methods=[], validation=loader(8))
    assert list(found.refused.values()) == [
        "the device's memory doesn't hold them: take fewer workers, or smaller batches"
    ]
