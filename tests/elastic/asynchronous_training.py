"""Trains three workers that don't wait for each other: run as a script, with a folder.

One is slow, and on a device, which is simulated.
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
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_decentral.elastic.wire import starter
from lightning_decentral.gossip import Asynchronous, Elastic, ElasticGossipStrategy, MixingMonitor
from tests.elastic.training import EXAMPLES, Places
from tests.simulated import trainers
from tests.tiny import QUIET

EPOCHS, ACCUMULATED, CHECK, GAMMA = 3, 2, 16, 0.99
ROUNDS = EXAMPLES // 3 // ACCUMULATED * EPOCHS
SLEEP, SLOW = 0.05, 0.4


class Net(LightningModule):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.full((50,), float(seed)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.x - 1).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.x.mean(), sync_dist=True, batch_size=1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, GAMMA)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self) -> DataLoader[int]:
        return DataLoader(Places(), batch_size=1)

    def val_dataloader(self) -> DataLoader[int]:
        return DataLoader(Places(), batch_size=EXAMPLES)


class Tell(Callback):
    def __init__(self, file: Path, sleep: float) -> None:
        self._stream, self._sleep = file.open("w", buffering=1), sleep

    def tell(self, kind: str, **words: Any) -> None:
        self._stream.write(json.dumps({"kind": kind, "at": time.monotonic(), **words}) + "\n")

    def on_train_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, batch: Tensor, batch_idx: int, *_: Any
    ) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        strategy: Any = trainer.strategy
        place = {"step": trainer.global_step, "epoch": trainer.current_epoch, "batch": trainer.fit_loop.batch_idx}
        place |= {"device": str(module.x.device)}
        self.tell("batch", **place, rate=rate, watched=strategy.mixing(), examples=batch.tolist())
        time.sleep(self._sleep / ACCUMULATED)

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        if not trainer.sanity_checking:
            self.tell("validated", step=trainer.global_step, x=module.x.tolist())

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        self.tell("end", step=trainer.global_step, epoch=trainer.current_epoch)


def main(folder: Path) -> None:
    starter.HASTY_SECONDS = 0.0
    number = int(os.environ.get(starter.WORKER, "0"))
    tell = Tell(folder / f"w{number}.jsonl", SLOW if number == 1 else SLEEP)
    there = number == 1
    made: Any = trainers.there(ElasticGossipStrategy) if there else ElasticGossipStrategy
    strategy = made(elastic=Elastic(workers=(3, 3), asynchronous=Asynchronous(behind=2)))
    saved = ModelCheckpoint(dirpath=folder / "saved", filename="{step}", save_top_k=-1)
    with trainers.device(seed=0) if there else nullcontext():
        trainer = Trainer(
            **{**QUIET, "enable_checkpointing": True, "accelerator": trainers.Accelerator() if there else "cpu"},
            strategy=strategy,
            devices=3,
            max_epochs=EPOCHS,
            accumulate_grad_batches=ACCUMULATED,
            val_check_interval=CHECK,
            callbacks=[MixingMonitor(), tell, saved],
        )
        trainer.fit(Net(number))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
