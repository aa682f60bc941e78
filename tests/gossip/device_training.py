"""Trains three elastic workers on a simulated device each, or on the host: run as a script, with folder and device.

With a third word worker 1 is killed in its sixth step, and another comes.
"""

import json
import os
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_decentral.elastic.wire import starter
from lightning_decentral.gossip import Elastic, ElasticGossipStrategy, Int8, QuasiGlobalMomentum
from tests import simulated
from tests.elastic.training import EXAMPLES, Places
from tests.simulated import CUDA
from tests.tiny import QUIET

STEPS, CHECK = 32, 8


class Accelerator(CPUAccelerator):
    """Of the device that is simulated."""

    def setup_device(self, device: torch.device) -> None: ...


class OnDevice(ElasticGossipStrategy):
    """Computes on it."""

    root_device = property(lambda self: CUDA, lambda self, device: None)  # type: ignore[assignment]


class Net(LightningModule):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 8)).double()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = torch.sin(batch.double().unsqueeze(1) * torch.arange(1, 9, device=batch.device))
        return (self.net(x) - x.flip(1)).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx), sync_dist=True, batch_size=1)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)

    def train_dataloader(self) -> DataLoader[int]:
        return DataLoader(Places(), batch_size=2)

    def val_dataloader(self) -> DataLoader[int]:
        return DataLoader(Places(), batch_size=EXAMPLES)


class Tell(Callback):
    def __init__(self, folder: Path, number: int, dies: bool) -> None:
        self._stream = (folder / f"w{number}.jsonl").open("w", buffering=1)
        self._joined, self._number, self._dies = folder / "joined", number, dies

    def tell(self, kind: str, **words: Any) -> None:
        self._stream.write(json.dumps({"kind": kind, **words}) + "\n")

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        if self._number > 2:
            self._joined.touch()

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        devices = {str(p.device) for p in module.parameters()}
        (state,) = {str(s["exp_avg"].device) for s in trainer.optimizers[0].state.values()}
        self.tell("step", step=trainer.global_step, devices=[*devices, state])
        if self._dies and self._number == 1 and trainer.global_step == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._dies and not self._joined.exists():
            time.sleep(0.3)  # so slowly until then that it comes in time

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        if not trainer.sanity_checking:
            x = [p.detach().cpu().flatten()[:5].tolist() for p in module.parameters()]
            self.tell("validated", step=trainer.global_step, x=x, loss=float(trainer.callback_metrics["loss"]))


def main(folder: Path, device: str, dies: bool) -> None:
    starter.HASTY_SECONDS = 0.0
    number = int(os.environ.get(starter.WORKER, "0"))
    made = OnDevice if device == "simulated" else ElasticGossipStrategy
    elastic = Elastic(workers=(2 if dies else 3, 3), dead_after=2.0)
    strategy = made(elastic=elastic, codec=Int8(block=16), combine=QuasiGlobalMomentum(momentum=0.5))
    saved = ModelCheckpoint(dirpath=folder / "saved", filename="{step}", save_top_k=-1)
    with simulated.device(seed=number) if device == "simulated" else nullcontext():
        Trainer(
            **{**QUIET, "enable_checkpointing": True, "accelerator": Accelerator() if device == "simulated" else "cpu"},
            strategy=strategy,
            devices=3,
            max_steps=STEPS,
            val_check_interval=CHECK,
            check_val_every_n_epoch=None,
            callbacks=[Tell(folder, number, dies), saved],
        ).fit(Net(0))  # who is the first, and begins with its own, is another one each time


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], len(sys.argv) > 3)
