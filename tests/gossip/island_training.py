"""Trains one device of an elastic worker: run by torchrun, with a folder, the lobby's place and the worker's name.

Behind them stand how many devices it has and how many epochs it trains. Then, maybe, the name of a device, as a1, which
is killed once.

What a device sees and knows after each step is a line of `<name><device>.jsonl`, of all its lives.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from torch import Tensor

from lightning_decentral.gossip import AllReduce, Complete, Elastic, GossipStrategy, Solo
from tests.gossip.weighted_training import Net
from tests.tiny import QUIET

KILLED = 8
"""The step in which it is."""


class Record(Callback):
    def __init__(self, folder: Path, device: str, dies: bool) -> None:
        self._file, self._dead, self._joined = folder / f"{device}.jsonl", folder / "dead", folder / "joined"
        self._dies, self._life = dies, int(self._dead.exists())

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if self._dies and trainer.global_step == KILLED and not self._dead.exists():
            self._dead.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: list[Tensor], *_: Any) -> None:
        strategy: Any = trainer.strategy
        line = {
            "life": self._life,
            "step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "members": list(strategy.members),
            "weight": module.net.weight[0].tolist(),
            "taken": batch[0].tolist(),
        }
        with self._file.open("a") as stream:
            stream.write(json.dumps(line) + "\n")
        if self._life and len(line["members"]) == 2:
            self._joined.touch()
        if self._dies and not self._joined.exists():
            time.sleep(0.05)


class Slowly(Callback):
    """Until the killed one has come back."""

    def __init__(self, folder: Path) -> None:
        self._joined, self._dead = folder / "joined", folder / "dead"

    def on_train_batch_end(self, *_: Any) -> None:
        if self._dead.exists() and not self._joined.exists():
            time.sleep(0.3)


def main(folder: Path, lobby: str, name: str, devices: int, epochs: int, dies: str = "") -> None:
    device = f"{name}{os.environ['LOCAL_RANK']}"
    strategy = GossipStrategy(
        elastic=Elastic(lobby=lobby, workers=(1 if dies else 2, 2), dead_after=1.5, host="127.0.0.1"),
        island=AllReduce(devices) if devices > 1 else Solo(),
        topology=Complete(),
        delay=0,
    )
    callbacks = [Record(folder, device, device == dies), Slowly(folder)]
    Trainer(**QUIET, strategy=strategy, devices=devices, max_epochs=epochs, callbacks=callbacks).fit(Net())


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:4], int(sys.argv[4]), int(sys.argv[5]), *sys.argv[6:])
