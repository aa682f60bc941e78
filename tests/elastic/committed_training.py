"""Trains three elastic workers with committed outer rounds: run as a script, with a folder and a plan's name.

Numbers of workers may follow, which no other one reaches.
"""

import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_decentral.elastic.wire import starter
from lightning_decentral.gossip import (
    Complete,
    Elastic,
    Every,
    GossipStrategy,
    Int4,
    OuterNesterov,
    Plain,
    PseudoGradient,
    Stream,
)
from lightning_decentral.optim import Muon, muon_groups
from lightning_decentral.shared.compute.worker_state import digest
from tests.elastic.wire.hidden import REFUSES, behind
from tests.tiny import QUIET

STEPS, H = 90, 3
PLANS: dict[str, dict[str, Any]] = {
    "int4": {"combine": PseudoGradient(lr=0.8, momentum=0.5), "codec": Int4(), "topology": Every(H, Complete())},
    "diloco": {"combine": OuterNesterov(lr=0.7, momentum=0.6), "delay": 0, "topology": Every(H, Complete())},
    "stream": {
        "combine": PseudoGradient(lr=0.8, momentum=0.0),
        "codec": Plain(),
        "topology": Stream(steps=4, parts=2, inner=Complete()),
    },
}


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(os.getpid())  # all take the founder's parameters
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss: Tensor = (self.layers(x) - y).square().mean()
        return loss

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return Muon(muon_groups(self), lr=0.02)

    def _data(self, batch: int) -> DataLoader[Any]:
        x = torch.randn(240, 6, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x, x[:, :1].sin() + x[:, 1:2] * x[:, 2:3] / 2), batch_size=batch)

    def train_dataloader(self) -> DataLoader[Any]:
        return self._data(8)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._data(240)


class Tell(Callback):
    """Writes a line for each step: a digest of anchors, momenta and decisions."""

    def __init__(self, file: Path, joined: Path) -> None:
        self._stream, self._joined = file.open("w", buffering=1), joined

    def tell(self, kind: str, **words: Any) -> None:
        self._stream.write(json.dumps({"kind": kind, **words}) + "\n")

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, *_: Any) -> None:
        strategy: Any = trainer.strategy
        states = [dict(state) for each in strategy._mixers for state in each.mixer._states]
        self.tell(
            "step",
            step=trainer.global_step,
            members=strategy.members,
            name=strategy._member.worker.name,
            pid=os.getpid(),
            rank=trainer.global_rank,
            loss=float(outputs["loss"]),
            chain=[exchange.chain for exchange in strategy._exchanges.each],
            digest=digest(states),
        )
        time.sleep(0.01 if self._joined.exists() else 0.15 if trainer.global_step < STEPS // 2 else 0.4)


def main(folder: Path, plan: str, *hidden: str) -> None:
    starter.HASTY_SECONDS = 0.0
    number = os.environ.get(starter.WORKER, "")
    with behind(REFUSES) if number in hidden else nullcontext():
        train(folder, plan, number)


def train(folder: Path, plan: str, number: str) -> None:
    strategy = GossipStrategy(elastic=Elastic(workers=(1, 3), dead_after=1.5, host="127.0.0.1"), **PLANS[plan])
    tell = Tell(folder / f"w{number}.jsonl", folder / "joined")
    trainer = Trainer(
        **QUIET,
        strategy=strategy,
        devices=3,
        max_steps=STEPS,
        callbacks=[tell] if number else [],
    )
    trainer.fit(module := Net())
    tell.tell("end", digest=digest(dict(module.state_dict())))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
