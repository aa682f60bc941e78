"""Queues and their pointers where pipelines gossip: each replica's own in training, one replica's in the mean model."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_decentral import TokenPipelineStrategy
from lightning_decentral.gossip import GossipReplicas
from lightning_decentral.pipeline import Chain, blocks_of
from tests.crew import crew
from tests.tiny import QUIET

CARRIED = ("keys", "labels", "at")


class Bank(nn.Module):
    """A layer that remembers its last inputs, a label of each, and their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("keys", torch.zeros(6, 4))
        self.register_buffer("labels", torch.zeros(6, dtype=torch.int64))
        self.register_buffer("at", torch.zeros((), dtype=torch.int64))
        self.register_buffer("running_mean", torch.zeros(4))

    @torch.no_grad()
    def remember(self, x: Tensor) -> None:
        place = int(self.at) % 6
        self.keys[place], self.labels[place] = x.mean(dim=0), int(1000 * float(x.sum()))
        self.at += 1
        self.running_mean.lerp_(x.mean(dim=0), 0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.remember(x)
        return self.linear(x)


class Piped(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 4), Bank(), nn.Linear(4, 4), Bank())
        self.seen: dict[str, dict[str, Any]] = {}

    def pipeline_stages(self) -> Chain:
        return Chain(self.net, blocks_of(list(self.net)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.net(batch[0])
        self.look("validated")

    def on_validation_start(self) -> None:
        self.look("begun")

    def on_train_batch_end(self, *_: Any) -> None:
        self.look("trained")

    def look(self, when: str) -> None:
        self.seen[when] = {name: buffer.tolist() for name, buffer in self.named_buffers()}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder: Path) -> Any:
    module = Piped()
    data = torch.utils.data.TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(1)))
    given = [torch.utils.data.DataLoader(data, batch_size=size) for size in (2, 16)]
    saving = ModelCheckpoint(dirpath=folder, filename="saved")
    strategy = TokenPipelineStrategy(stages=2, replicas=GossipReplicas())
    options = {**QUIET, "enable_checkpointing": True, "max_epochs": 1, "devices": 4, "callbacks": [saving]}
    Trainer(**options, strategy=strategy).fit(module, *given)
    module.look("handed back")
    return module.seen


def test_a_queue_is_one_replicas_where_the_mean_is_shown_saved_and_handed_back(tmp_path: Path) -> None:
    found = [outcome.value or outcome.error for outcome in crew(4, fit, tmp_path, seconds=60)]
    saved = torch.load(tmp_path / "saved.ckpt")["state_dict"]
    for place, bank in enumerate(("net.1", "net.3")):
        first, second = found[place], found[place + 2]
        for name in (f"{bank}.{kind}" for kind in CARRIED):
            own, value = first["trained"][name], saved[name].tolist()
            assert own == first["validated"][name] == second["validated"][name] == value
            assert all(seen["handed back"][name] == value for seen in found)
        assert second["trained"][f"{bank}.labels"] != first["trained"][f"{bank}.labels"]
        mean = torch.tensor([one["trained"][f"{bank}.running_mean"] for one in (first, second)]).mean(dim=0)
        torch.testing.assert_close(saved[f"{bank}.running_mean"], mean)
