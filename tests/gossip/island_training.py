"""Trains one device of an elastic worker: run by torchrun, with a folder, the lobby's place and the worker's name.

Behind them stand what the worker is (`FullyShard(2)`), the rounds (a key of `ROUNDS`), how many epochs
it trains, the name of a device, as a1, which is killed once, and a checkpoint from which it goes on; "-" is none. With
DEVICE=simulated it computes on such a device.

What a device sees and knows after each step is a line of `<name><device>.jsonl`, of all its lives. Digests of what was
given to a newcomer, and of what one began with, are lines of `<name><device>.digests`.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_decentral.gossip import (
    AllReduce,
    Complete,
    Elastic,
    ElasticGossipStrategy,
    Every,
    FullyShard,
    Gossip,
    Int4,
    PseudoGradient,
    Solo,
    Travel,
)
from lightning_decentral.shared.compute.worker_state import digest
from lightning_decentral.shared.wire.fsdp import full_tensor, local
from tests.elastic.weighted_training import Net
from tests.simulated import trainers
from tests.tiny import QUIET

KILLED = 8
"""The first step in which it may be."""
POISONED, WHERE = 3, "a1"
"""The step in which it is, and the device."""
ISLANDS = {str(island): island for island in (Solo(), AllReduce(2), FullyShard(2))}
AVERAGED = {"topology": Complete(), "delay": 0}
H = 2
COMMITTED = {"topology": Every(H, Complete()), "combine": PseudoGradient(lr=0.8, momentum=0.5)}
DECAY = 0.99
EXACT, TRAVELS = 5, {"momentum_buffer": Travel()}
ROUNDS: dict[str, dict[str, Any]] = {
    "averaged": AVERAGED,
    "poisoned": AVERAGED,
    "delayed": {},
    "committed": COMMITTED,
    "accumulated": COMMITTED,
    "two optimizers": COMMITTED,
    "four bits": {**COMMITTED, "codec": Int4()},
    "exact": {**COMMITTED, "exact_steps": EXACT},
    "all exact": {"exact_steps": 1000},
    "travelling": {**AVERAGED, "states": TRAVELS},
    "travelling, committed": {**COMMITTED, "states": TRAVELS},
    "written": {"evaluate": "own", "combine": Gossip(rate=0.4)},
}
WRITTEN = 0.125
"""What a callback sets the first layer to where training ends."""


class Deep(Net):
    """Rows that don't divide evenly among devices, and an optimizer that remembers."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Linear(4, 5, dtype=torch.float64), nn.Linear(5, 1, dtype=torch.float64)
        self.net = nn.Sequential(layers[0], nn.Tanh(), layers[1])  # type: ignore[assignment]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        _, x, y = batch
        self.log("error", (self.net(x) - y).square().mean(), sync_dist=True)

    val_dataloader = Net.train_dataloader


class Two(Deep):
    """An optimizer for each layer, stepped by hand: the second in every other batch, and there twice."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss, optimizers = super().training_step(batch, batch_idx), self.optimizers()
        for optimizer in optimizers:  # type: ignore[union-attr]
            optimizer.zero_grad()
        self.manual_backward(loss)
        first, second = optimizers  # type: ignore[misc]
        first.step()
        if batch_idx % 2:
            second.step()
            second.step()
        self.lr_schedulers().step()  # type: ignore[union-attr,call-arg]
        return loss

    def configure_optimizers(self) -> Any:
        made = [torch.optim.SGD(self.net[at].parameters(), lr=0.05, momentum=0.9) for at in (0, 2)]  # type: ignore[index]
        return made, [torch.optim.lr_scheduler.StepLR(made[0], 1, DECAY)]


def rule_of(strategy: Any) -> str:
    """Digest of what the first device keeps of rounds: anchors, momenta, and the checksum of the decisions."""
    states = [dict(state) for each in strategy._mixers for state in each.mixer._states]
    return digest([states, [exchange.chain for exchange in strategy._exchanges.each]])


def buffers_of(optimizer: Any) -> list[float]:
    """Of a device that has whole ones."""
    found = [state["momentum_buffer"] for state in optimizer.state.values()]
    return [x for tensor in found for x in local(tensor).flatten().tolist()]


def flat(module: nn.Module) -> list[float]:
    """All parameters, whole; collective where they are sharded."""
    return torch.cat([full_tensor(parameter).flatten() for parameter in module.parameters()]).tolist()


class Record(Callback):
    def __init__(self, folder: Path, device: str, dies: bool) -> None:
        self._file, self._dead, self._joined = folder / f"{device}.jsonl", folder / "dead", folder / "joined"
        self._dies, self._life = dies, int(self._dead.exists())

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        strategy: Any = trainer.strategy
        own = {"model": dict(module.state_dict()), "optimizer": trainer.optimizers[0].state_dict()["state"]}
        tell_digest(self._file, "begins", strategy.checkpoints.held.whole(own))

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        strategy: Any = trainer.strategy
        both = len(strategy.members) == 2
        if self._dies and both and trainer.global_step >= KILLED and not self._dead.exists():
            self._dead.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: list[Tensor], *_: Any) -> None:
        strategy: Any = trainer.strategy
        line = {
            "life": self._life,
            "step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "members": list(strategy.members),
            "weight": flat(module),
            "taken": batch[0].tolist(),
            "healed": strategy.traffic().healed,
            "rule": rule_of(strategy),
            "rate": trainer.optimizers[0].param_groups[0]["lr"],
            "buffers": buffers_of(trainer.optimizers[0]),
            "apart": strategy.consensus().absolute if trainer.global_step < 3 else None,
        }
        with self._file.open("a") as stream:
            stream.write(json.dumps(line) + "\n")
        if self._life and len(line["members"]) == 2:
            self._joined.touch()
        if self._dies and not self._joined.exists():
            time.sleep(0.05)

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        line = {"step": trainer.global_step, "error": float(trainer.callback_metrics["error"]), "mean": flat(module)}
        with self._file.with_suffix(".validated").open("a") as stream:
            stream.write(json.dumps(line) + "\n")


class Poison(Callback):
    """Of this device alone: what it has of parameters, and of what the optimizer keeps."""

    @torch.no_grad()
    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == POISONED:
            for parameter, state in trainer.optimizers[0].state.items():
                for tensor in (parameter, state["momentum_buffer"]):
                    local(tensor).fill_(torch.nan)


class Write(Callback):
    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        local(module.net[0].weight).data.fill_(WRITTEN)


def tell_digest(file: Path, kind: str, own: dict[str, Any]) -> None:
    with file.with_suffix(".digests").open("a") as stream:
        stream.write(json.dumps({"kind": kind, "digest": digest([own["model"], own["optimizer"]])}) + "\n")


class Slowly(Callback):
    """Until both are there, and until the killed one has come back."""

    def __init__(self, folder: Path) -> None:
        self._joined, self._dead = folder / "joined", folder / "dead"

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        waits, end = self._dead.exists() or len(strategy.members) < 2, time.monotonic() + 1.0
        while waits and not self._joined.exists() and time.monotonic() < end:
            time.sleep(0.05)


def on_device(train: Callable[[bool], None]) -> None:
    """`train`, on the simulated device where the environment says so."""
    if os.environ.get("DEVICE") == "simulated":
        with trainers.device(seed=int(os.environ["LOCAL_RANK"])):
            train(True)
    else:
        train(False)


def main(
    folder: Path, lobby: str, name: str, island: str, rounds: str, epochs: int, dies: str, saved: str, there: bool
) -> None:
    device = f"{name}{os.environ['LOCAL_RANK']}"
    record = Record(folder, device, device == dies)
    edits: list[Callback] = [Poison()] if (rounds, device) == ("poisoned", WHERE) else []
    edits += [Write()] if rounds == "written" else []
    copy = ElasticGossipStrategy._copy

    def copied(self: Any) -> Any:
        found = copy(self)
        if found:
            own = found["trainer"]
            given = {"model": dict(own["state_dict"]), "optimizer": own["optimizer_states"][0]["state"]}
            tell_digest(folder / f"{device}.jsonl", "copied", given)
        return found

    ElasticGossipStrategy._copy = copied  # type: ignore[method-assign]
    made: Any = trainers.there(ElasticGossipStrategy) if there else ElasticGossipStrategy
    strategy = made(
        elastic=Elastic(lobby=lobby, workers=(2 if dies == "-" else 1, 2), dead_after=1.5, host="127.0.0.1"),
        island=ISLANDS[island],
        **ROUNDS[rounds],
        **(trainers.SETTINGS if there else {}),
    )
    saving = ModelCheckpoint(dirpath=folder / "saved", filename="{step}", save_top_k=-1)
    trainer = Trainer(
        **{**QUIET, "enable_checkpointing": True, "accelerator": trainers.Accelerator() if there else "cpu"},
        strategy=strategy,
        devices=ISLANDS[island].devices,
        max_epochs=epochs,
        accumulate_grad_batches=2 if rounds == "accumulated" else 1,
        callbacks=[record, saving, *edits, *([] if dies == "-" else [Slowly(folder)])],
    )
    module = Two() if rounds == "two optimizers" else Deep()
    trainer.fit(module, ckpt_path=None if saved == "-" else saved)
    torch.save(module.state_dict(), folder / f"{device}.pt")


if __name__ == "__main__":
    on_device(partial(main, Path(sys.argv[1]), *sys.argv[2:6], int(sys.argv[6]), *sys.argv[7:]))
