"""A worker that an exception ends saves what it has by itself: the members wait for its message meanwhile."""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_decentral import GossipStrategy
from lightning_decentral.gossip import Elastic
from tests.crew import by_itself, crew
from tests.elastic.wire.lobbies import LobbyProcess
from tests.tiny import QUIET

LONG = 60.0
"""Seconds that a worker waits for others; that nobody has waited so long shows where a busy machine doesn't."""


class Failing(LightningModule):
    """The oldest fails in the third step of two; the other trains until it is alone."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.most, self.fails, self.steps = nn.Parameter(torch.zeros(3)), 0, False, 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        strategy: Any = self.trainer.strategy
        members = len(strategy.members)
        if members > self.most:
            self.most, self.fails = members, members == 2 and self.global_rank == 0
        self.steps += self.fails
        if self.steps == 3:
            raise OSError("the user's own")
        self.trainer.should_stop = members < self.most
        return (self.x - 1).square().sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(lobby: str, folder: Path) -> float:
    rank = by_itself()
    elastic = Elastic(lobby=lobby, workers=(1, 2), dead_after=5.0, host="127.0.0.1")
    strategy = GossipStrategy(elastic=elastic, delay=0, timeout=timedelta(seconds=LONG))
    given = {**QUIET, "enable_checkpointing": True, "use_distributed_sampler": False}
    saved = OnExceptionCheckpoint(folder / str(rank), "last")
    trainer = Trainer(**given, devices=1, max_epochs=-1, strategy=strategy, callbacks=[saved])
    began = time.monotonic()
    trainer.fit(Failing(), DataLoader(TensorDataset(torch.zeros(6, 1))))
    return time.monotonic() - began


def test_a_save_on_the_way_out_of_the_oldest_keeps_nobody_waiting(tmp_path: Path) -> None:
    with LobbyProcess(least=1, most=2) as lobby:
        outcomes = crew(2, fit, lobby.place, tmp_path, seconds=120.0)
    (failed,) = (outcome for outcome in outcomes if outcome.error)
    (other,) = (outcome for outcome in outcomes if outcome.value is not None)
    assert failed.error.startswith("OSError: the user's own")
    assert max(failed.seconds, other.value) < LONG
    (file,) = tmp_path.rglob("*.ckpt")
    assert torch.load(file, weights_only=False)["state_dict"]["x"].isfinite().all()
