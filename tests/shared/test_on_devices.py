"""LAW: under a real Trainer strategies train, and validate the mean, on devices as on hosts, and no host waits for its
device in a step.

Devices are simulated. Messages go by gloo here, so a host waits where they are staged for it, and for nothing else.
Steps of pipelines and of partial backprop have tests of their own.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_decentral import CompressedStrategy, GossipStrategy
from lightning_decentral.gossip import AllReduce, Int8, PushSum
from tests.crew import crew
from tests.simulated.trainers import fit
from tests.tiny import SizedBatches


class Classifier(LightningModule):
    """Without tied weights and buffers, which `module.to` gives up on the simulated device. Its metrics are each
    worker's own: Lightning would sum them without our transport."""

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self._reads = reads

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        hidden = self.norm(self.first(x)).relu()
        return nn.functional.cross_entropy(self.head(self.second(hidden).relu()), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train/loss", loss)
        if self._reads:
            float(loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.loss(batch), batch_size=4)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "gossip": (GossipStrategy, {}),
    "blocking": (GossipStrategy, {"delay": 0}),
    "push-sum": (GossipStrategy, {"combine": PushSum()}),
    "Int8": (GossipStrategy, {"codec": Int8()}),
    "island": (GossipStrategy, {"island": AllReduce(devices=2)}),
    "compressed": (CompressedStrategy, {}),
}
STAGING = {"shared/wire/transport.py", "shared/wire/pending.py"}


def made(case: str, reads: bool) -> Callable[[], tuple[Any, ...]]:
    return lambda: (*CASES[case], Classifier(reads), (SizedBatches(5), SizedBatches(2)))


def runs(case: str, on_device: bool, reads: bool = False) -> list[Any]:
    settings = {"max_steps": 5, "devices": 2, "val_check_interval": 3, "log_every_n_steps": 100}
    found = crew(2, fit, made(case, reads), on_device, settings)
    for outcome in found:
        assert outcome.value is not None, outcome.error + outcome.output
    return [outcome.value for outcome in found]


def elsewhere(waits: list[str]) -> list[str]:
    """Those that aren't of messages."""
    return [wait for wait in waits if wait.split()[-1].partition(":")[0] not in STAGING]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_the_host(case: str) -> None:
    there, here = runs(case, True), runs(case, False)
    for (found, logged, steps, validation), (expected, said, _, _) in zip(there, here, strict=True):
        assert elsewhere(steps) == []
        assert validation == []
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)
        assert logged == pytest.approx(said, rel=1e-5)


@pytest.mark.slow
def test_a_step_that_reads_its_loss_is_seen() -> None:
    """Once in each step that is looked at."""
    for _, _, steps, _ in runs("gossip", True, reads=True):
        found = elsewhere(steps)
        assert len(found) == 4
        assert all(wait.startswith("_local_scalar_dense ") for wait in found)
