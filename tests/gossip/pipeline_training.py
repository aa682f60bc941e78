"""Trains one stage of an elastic pipeline: run by torchrun, with a folder, the lobby's place and the worker's name.

Behind them stand the rounds (a key of `ROUNDS`), how many epochs it trains, the name of a stage, as a1, which is killed
once, and a checkpoint from which it goes on; "-" is none. What a stage sees and knows is recorded as by
`island_training`, of its own part of the model.
"""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_decentral import TokenPipelineStrategy
from lightning_decentral.gossip import Elastic, GossipReplicas
from lightning_decentral.pipeline import Chain, blocks_of
from tests.gossip.island_training import ROUNDS, Deep, Record, Slowly, on_device, tell_digest
from tests.simulated import trainers
from tests.tiny import QUIET

STAGES = 2


class Piped(Deep):
    def pipeline_stages(self) -> Chain:
        return Chain(self.net, blocks_of(list(self.net)))


class RecordStage(Record):
    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        optimizer = trainer.optimizers[0].state_dict()["state"]
        tell_digest(self._file, "begins", {"model": dict(module.state_dict()), "optimizer": optimizer})


def main(folder: Path, lobby: str, name: str, rounds: str, epochs: int, dies: str, saved: str, there: bool) -> None:
    device = f"{name}{os.environ['LOCAL_RANK']}"
    elastic = Elastic(lobby=lobby, workers=(2 if dies == "-" else 1, 2), dead_after=1.5, host="127.0.0.1")
    made: Any = trainers.there(TokenPipelineStrategy) if there else TokenPipelineStrategy
    own = trainers.SETTINGS if there else {}
    strategy = made(replicas=GossipReplicas(elastic=elastic, **ROUNDS[rounds]), **own)
    copy = strategy.whole

    def copied(own: dict[str, Any]) -> dict[str, Any]:
        found = copy(own)
        for stage, part in enumerate(found["stages"]):
            given = {"model": dict(part["state_dict"]), "optimizer": part["optimizer_states"][0]["state"]}
            tell_digest(folder / f"{name}{stage}.jsonl", "copied", given)
        return found

    strategy.whole = copied
    record = RecordStage(folder, device, device == dies)
    saving = ModelCheckpoint(dirpath=folder / "saved", filename="{step}", save_top_k=-1)
    trainer = Trainer(
        **{**QUIET, "enable_checkpointing": True, "accelerator": trainers.Accelerator() if there else "cpu"},
        strategy=strategy,
        devices=STAGES,
        max_epochs=epochs,
        callbacks=[record, saving, *([] if dies == "-" else [Slowly(folder)])],
    )
    module = Piped()
    trainer.fit(module, ckpt_path=None if saved == "-" else saved)
    torch.save(module.state_dict(), folder / f"{device}.pt")


if __name__ == "__main__":
    on_device(partial(main, Path(sys.argv[1]), *sys.argv[2:5], int(sys.argv[5]), *sys.argv[6:]))
