"""A worker of `elastic.py`: a small student learns a teacher, each step sleeps as an accelerator would compute."""

import json
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_decentral.gossip import Asynchronous, Elastic, GossipStrategy

FIRST = "w0"
WIDTH, EXAMPLES, HELD_OUT, BATCH = 64, 4096, 1024, 16


@dataclass(frozen=True)
class Job:
    """Settings that all workers of a run share.

    Args:
        lobby: where they meet; empty: plain gossip, of `workers` that this process forks.
        steps: of the run; -1: until it is ended.
        sleep: seconds in each step.
        host: of this worker, where others reach it.
        asynchronous: whether nobody waits.
        slow: times as long as the others' are the steps of the first worker that is started.
        peer: who does it instead, of `PEERS`.
    """

    folder: Path
    workers: int
    steps: int
    sleep: float
    dead_after: float
    lobby: str = ""
    host: str = "127.0.0.1"
    asynchronous: bool = False
    slow: float = 1.0
    peer: str = ""

    def strategy(self) -> Any:
        if not self.lobby:
            return GossipStrategy(start_method="fork")
        least = max(1, self.workers // 2)
        elastic = Elastic(
            lobby=self.lobby,
            workers=(least, self.workers),
            dead_after=self.dead_after,
            host=self.host,
            asynchronous=Asynchronous() if self.asynchronous else None,
        )
        return GossipStrategy(elastic=elastic)


class Student(LightningModule):
    """Mean squared error to a teacher of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.teacher, self.net = net(64), net(256)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch[0])

    def loss(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.teacher(x)
        return (self.net(x) - y).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(examples(2, EXAMPLES)), BATCH, shuffle=True)


def net(hidden: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1)
    )


def examples(seed: int, number: int) -> Tensor:
    return torch.randn(number, WIDTH, generator=torch.Generator().manual_seed(seed))


class Tell(Callback):
    """A line for each step, with the time that all processes of a machine share."""

    def __init__(self, job: Job, name: str) -> None:
        self._job, self._name = job, name

    def tell(self, kind: str, **words: Any) -> None:
        with (self._job.folder / f"{self._name}.jsonl").open("a") as stream:
            stream.write(json.dumps({"kind": kind, "at": time.monotonic(), **words}) + "\n")

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        self._name += "" if self._job.lobby else f"-{trainer.global_rank}"

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(self._job.sleep * (self._job.slow if self._name == FIRST else 1.0))
        self.tell("step", step=trainer.global_step)


def train(parent: int, job: Job, name: str) -> None:
    """Train until the run or the parent process ends."""
    begin(parent, job, name)
    module, tell = Student(), Tell(job, name)
    quiet = {f"enable_{what}": False for what in ("checkpointing", "progress_bar", "model_summary")}
    trainer = Trainer(
        strategy=job.strategy(),
        accelerator="cpu",
        devices=1 if job.lobby else job.workers,
        max_steps=job.steps,
        max_epochs=-1,
        callbacks=[tell],
        logger=False,
        **quiet,
    )
    trainer.fit(module)
    with torch.no_grad():
        tell.tell("end", loss=float(module.loss(examples(3, HELD_OUT))))


def begin(parent: int, job: Job, name: str) -> None:
    """This process ends with its parent, and writes to a file."""
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    output = os.open(job.folder / f"{name}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1), os.dup2(output, 2)
    torch.set_num_threads(1)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
