"""LAW: under a real Trainer strategies train, and validate the mean, on devices as on hosts, and no host waits for its
device in a step.

Devices are simulated. Messages go by gloo here, so a host waits where they are staged for it.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_decentral import CompressedStrategy, GossipStrategy, PartialBackpropStrategy, TokenPipelineStrategy
from lightning_decentral.gossip import AllReduce, FullyShard, GossipReplicas, Int8, PushSum
from lightning_decentral.partial import Staircase
from lightning_decentral.pipeline import Given
from tests.crew import crew
from tests.pipeline.training import Language
from tests.simulated.trainers import Fitted, fit
from tests.tiny import SizedBatches


class Classifier(LightningModule):
    """Its metrics are each worker's own: Lightning would sum them without our transport."""

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


class Blocks(Classifier):
    """With what FSDP gathers by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.ModuleList([self.second])

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.head(self.second[0](self.norm(self.first(x)).relu()).relu()), y)


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        shows: where a validation's host waits for its device beside messages, and how often at most in a batch.
        devices: workers, or devices of all of them.
        cut: the run is saved after so many steps, and resumed; 0: it isn't.
    """

    strategy: Any
    options: dict[str, Any] = field(default_factory=dict)
    module: Callable[[], LightningModule] = Classifier
    loaders: tuple[Any, ...] = (SizedBatches(5), SizedBatches(2))
    shows: dict[str, int] = field(default_factory=dict)
    steps: int = 5
    devices: int = 2
    cut: int = 0


class Text(Language):
    """Its metrics are each worker's own, and all stages have the same."""

    def __init__(self) -> None:
        super().__init__("llama")

    def log(self, *args: Any, sync_dist: bool = False, **options: Any) -> None:
        super().log(*args, **options)


PIPELINE = {"slicing": Given((5, 1, 4, 3))}
OF_TEXT: dict[str, Any] = {
    "module": Text,
    "loaders": (),
    "shows": {"pipeline/wire/stage_runner.py": 2},
    "steps": 3,
    "devices": 4,
}
CASES = {
    "gossip": Case(GossipStrategy),
    "push-sum": Case(GossipStrategy, {"combine": PushSum()}),
    "Int8": Case(GossipStrategy, {"codec": Int8()}),
    "island": Case(GossipStrategy, {"island": AllReduce(devices=2)}),
    "shards": Case(GossipStrategy, {"island": FullyShard(devices=2)}, module=Blocks, devices=4, cut=3),
    "compressed": Case(CompressedStrategy),
    "partial": Case(PartialBackpropStrategy, {"depth": Staircase(), "cuts": ["second"]}),
    "averaged pipelines": Case(TokenPipelineStrategy, {"stages": 2, "microbatches": 2, **PIPELINE}, **OF_TEXT),
    "gossiping pipelines": Case(
        TokenPipelineStrategy, {"stages": 2, "replicas": GossipReplicas(), **PIPELINE}, **OF_TEXT
    ),
}
STAGING = {"shared/wire/transport.py", "shared/wire/pending.py"}


def made(case: Case, reads: bool) -> Callable[[], tuple[Any, ...]]:
    return lambda: (case.strategy, case.options, Classifier(reads=True) if reads else case.module(), case.loaders)


def runs(case: Case, on_device: bool, folder: Path | None = None, reads: bool = False) -> list[Fitted]:
    settings = {"max_steps": case.steps, "devices": case.devices, "val_check_interval": 3, "log_every_n_steps": 100}
    place = None if folder is None or not case.cut else folder / str(on_device)
    found = crew(case.devices, fit, made(case, reads), on_device, settings, case.cut, place)
    for outcome in found:
        assert outcome.value is not None, outcome.error + outcome.output
    return [outcome.value for outcome in found]


def elsewhere(waits: list[str], asks: dict[str, int], steps: int) -> list[str]:
    """Places that aren't of messages and ask more often than they may in so many steps."""
    places = Counter(wait.split()[-1].partition(":")[0] for wait in waits)
    return [place for place, n in places.items() if place not in STAGING and n > steps * asks.get(place, 0)]


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=[*CASES])
def test_training_is_that_of_the_host(case: Case, tmp_path: Path) -> None:
    there, here = runs(case, True, tmp_path), runs(case, False, tmp_path)
    for found, expected in zip(there, here, strict=True):
        assert elsewhere(found.steps, {}, case.steps - 1) == []
        assert elsewhere(found.validation, case.shows, 2) == []
        for a, b in ((found.state, expected.state), (found.saved, expected.saved)):
            assert a.keys() == b.keys()
            for name, tensor in b.items():
                torch.testing.assert_close(a[name], tensor, rtol=1e-5, atol=1e-6)
        assert found.logged == pytest.approx(expected.logged, rel=1e-5)


@pytest.mark.slow
def test_a_step_that_reads_its_loss_is_seen() -> None:
    """Once in each step that is looked at."""
    for worker in runs(CASES["gossip"], True, reads=True):
        found = [wait for wait in worker.steps if wait.startswith("_local_scalar_dense ")]
        assert len(found) == 4
        assert elsewhere(worker.steps, {}, 4) == [found[0].split()[-1].partition(":")[0]]
