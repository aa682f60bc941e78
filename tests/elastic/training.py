"""Trains one elastic worker: run as a script, with a folder, the lobby's place, and a name for what it records.

With "" for place and name it starts three, w0, w1 and w2, and their lobby.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_decentral.elastic.wire import starter
from lightning_decentral.gossip import (
    CommunicationMonitor,
    ConsensusMonitor,
    Elastic,
    ElasticGossipStrategy,
    Float32,
    GossipStrategy,
    QuasiGlobalMomentum,
    Report,
    Ring,
    StartSummary,
)
from lightning_decentral.shared.compute.worker_state import digest
from tests.tiny import QUIET

STEPS, APART, EXAMPLES, BATCH = 120, 5, 96, 4
EVERY, APART_EVERY = 10, 7


class Places(Dataset[int]):
    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, place: int) -> int:
        return place


class Net(LightningModule):
    """Each worker goes its own way for some steps, and nowhere afterwards: then only rounds change it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.full((50,), float(seed), dtype=torch.float64))
        self.y = nn.Parameter(torch.full((3,), float(seed), dtype=torch.float64))
        self.seed = seed

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        way = torch.randn(50, generator=torch.Generator().manual_seed(self.seed), dtype=torch.float64)
        return (self.x * way).sum() * (1.0 if self.global_step < APART else 0.0) + self.y.square().sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("own", float(self.seed), sync_dist=True, batch_size=1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD([{"params": [self.x]}, {"params": [self.y], "momentum": 0.9}], lr=0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.99), "interval": "step"},
        }

    def train_dataloader(self) -> DataLoader[int]:
        return DataLoader(Places(), batch_size=BATCH)

    def val_dataloader(self) -> DataLoader[int]:
        return DataLoader(Places(), batch_size=EXAMPLES)


class Tell(Callback):
    """Writes a line for each step and each validation; goes slowly until somebody has come late."""

    def __init__(self, file: Path, joined: Path) -> None:
        self._stream = file.open("w", buffering=1)
        self._joined = joined
        self._validations = 0

    def state_dict(self) -> dict[str, Any]:
        return {"validations": self._validations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._validations = state_dict["validations"]

    def tell(self, kind: str, **words: Any) -> None:
        self._stream.write(json.dumps({"kind": kind, **words}) + "\n")

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        kept = trainer.strategy._mixers[0].mixer._states
        own = [dict(module.state_dict()), trainer.optimizers[0].state_dict()["state"], kept]
        self.tell("begins", digest=digest(own))

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Tensor, *_: Any) -> None:
        strategy: Any = trainer.strategy
        optimizer = trainer.optimizers[0]
        self.tell(
            "step",
            step=trainer.global_step,
            rank=trainer.global_rank,
            members=strategy.members,
            name=strategy._member.worker.name,
            pid=os.getpid(),
            validations=self._validations,
            watched=strategy.mixing(),
            apart=[
                float(trainer.callback_metrics.get(f"gossip/consensus_distance{of}", 0)) for of in ("", "_relative")
            ],
            x=module.x.tolist(),
            rate=optimizer.param_groups[0]["lr"],
            epoch=trainer.current_epoch,
            examples=batch.tolist(),
        )
        slowly = 0.15 if trainer.global_step < STEPS // 2 else 0.5
        time.sleep(0.01 if self._joined.exists() else slowly)

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        self._validations += 1
        own = float(trainer.callback_metrics["own"])
        members = trainer.strategy.members  # type: ignore[attr-defined]
        self.tell("validated", step=trainer.global_step, x=module.x.tolist(), own=own, members=members)

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        views = trainer.strategy.views()  # type: ignore[attr-defined]
        self.tell("end", step=trainer.global_step, views={view.number: view.members for view in views})


def main(folder: Path, lobby: str, name: str, seed: int, checkpoint: str = "") -> None:
    starter.HASTY_SECONDS = 0.0
    number = os.environ.get(starter.WORKER, "")
    name, seed = (name, seed) if lobby else (f"w{number}", int(number or 0))
    tell = Tell(folder / f"{name}.jsonl", folder / "joined")
    copy, take = ElasticGossipStrategy._copy, ElasticGossipStrategy._take

    def copied(self: Any) -> Any:
        found = copy(self)
        own = [found["trainer"][name] for name in ("state_dict", "optimizer_states")]
        kept = found["rule"]["mixers"][0]["states"]
        tell.tell("copied", digest=digest([dict(own[0]), own[1][0]["state"], kept]))
        return found

    def taken(self: Any, trainer: Any, checkpoint: Any) -> None:
        take(self, trainer, checkpoint)
        tell.tell("healed", step=checkpoint["global_step"])

    ElasticGossipStrategy._copy, ElasticGossipStrategy._take = copied, taken  # type: ignore[method-assign]
    strategy = GossipStrategy(
        elastic=Elastic(lobby=lobby, workers=(2, 3), dead_after=1.5, host="127.0.0.1"),
        topology=Ring(),
        combine=QuasiGlobalMomentum(momentum=0.0),  # keeps something, and mixes as Gossip()
        codec=Float32(),
    )
    saved = ModelCheckpoint(dirpath=folder / "saved", filename="{step}", every_n_train_steps=EVERY, save_top_k=-1)
    watching = [ConsensusMonitor(every_n_steps=APART_EVERY), CommunicationMonitor(), StartSummary()]
    trainer = Trainer(
        **{**{name: of for name, of in QUIET.items() if name != "logger"}, "enable_checkpointing": True},
        strategy=strategy,
        devices=1 if lobby else 3,
        max_steps=STEPS,
        callbacks=[*watching, Report(directory=str(folder / "report")), tell, saved],
        val_check_interval=4,
        logger=CSVLogger(folder / "logs", flush_logs_every_n_steps=1),
        log_every_n_steps=5,
    )
    module = Net(seed)
    trainer.fit(module, ckpt_path=checkpoint or None)
    torch.save(module.state_dict(), folder / f"{name}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), *sys.argv[5:])
