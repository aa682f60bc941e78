"""Replicas that take the same updates are compared where they are shown and saved: one that isn't equal is named."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_decentral.compressed import CompressedStrategy
from lightning_decentral.partial import PartialBackpropStrategy
from tests.tiny import QUIET, Batches, Net, in_processes

STEPS = 3


class Poison(Callback):
    """Worker 1 alone changes one number after the second update: the checkpoint of the first stays."""

    def __init__(self, bad: float) -> None:
        self._bad = bad

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == 2 and trainer.global_rank == 1:
            with torch.no_grad():
                pl_module.state_dict()["head.bias"][0] += self._bad


def fit(folder: Path, bad: float, strategy: Any) -> None:
    settings = {**QUIET, "enable_checkpointing": True, "max_steps": STEPS, "val_check_interval": STEPS}
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    Trainer(**settings, devices=2, strategy=strategy, default_root_dir=folder, callbacks=[Poison(bad), saving]).fit(
        Net(), Batches(STEPS), Batches(1)
    )


@pytest.mark.parametrize(
    ("strategy", "bad"),
    [
        (CompressedStrategy(start_method="fork"), 30.0),
        (PartialBackpropStrategy(start_method="fork", cuts=["second"]), 1e30),
    ],
    ids=["compressed", "partial"],
)
def test_a_replica_that_is_not_equal_is_never_saved(tmp_path: Path, bad: float, strategy: Any) -> None:
    with pytest.raises(RuntimeError) as error:
        in_processes(fit, tmp_path, bad, strategy)
    assert "FloatingPointError: worker 1's head.bias is from" in str(error.value)
    assert [file.name for file in tmp_path.glob("*.ckpt")] == ["step=1.ckpt"]


def test_a_small_difference_is_said_and_training_goes_on(tmp_path: Path, capfd: Any) -> None:
    in_processes(fit, tmp_path, 1e-6, CompressedStrategy(start_method="fork"))
    said = capfd.readouterr().err
    assert said.count("worker 1's head.bias differs from worker 0's by") == 1
    assert len([*tmp_path.glob("*.ckpt")]) == STEPS
