"""Replicas that take the same updates are compared where they are shown and saved: one that isn't equal is named."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_decentral import GossipStrategy
from lightning_decentral.compressed import CompressedStrategy
from lightning_decentral.gossip import AllReduce
from lightning_decentral.partial import PartialBackpropStrategy
from tests.tiny import QUIET, Batches, Net, in_processes

STEPS = 3


class Poison(Callback):
    """Worker 1 alone changes one number after the second update: the checkpoint of the first stays."""

    def __init__(self, bad: float, name: str = "head.bias") -> None:
        self._bad, self._name = bad, name

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == 2 and trainer.global_rank == 1:
            with torch.no_grad():
                pl_module.state_dict()[self._name].view(-1)[0] = self._bad


class Nudge(Poison):
    """By one bit, or by a difference that a tolerance would let through."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == 2 and trainer.global_rank == 1:
            with torch.no_grad():
                pl_module.state_dict()[self._name].view(-1)[0] *= 1 + self._bad


def fit(folder: Path, poison: Callback, strategy: Any) -> None:
    settings = {**QUIET, "enable_checkpointing": True, "max_steps": STEPS, "val_check_interval": STEPS}
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    Trainer(**settings, devices=2, strategy=strategy, default_root_dir=folder, callbacks=[poison, saving]).fit(
        Net(), Batches(STEPS), Batches(1)
    )


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("strategy", "bad"),
    [
        (CompressedStrategy(start_method="fork"), 30.0),
        (PartialBackpropStrategy(start_method="fork", cuts=["second"]), 1e30),
        (GossipStrategy(start_method="fork", island=AllReduce(devices=2)), 30.0),
    ],
    ids=["compressed", "partial", "island"],
)
def test_a_replica_that_is_not_equal_is_never_saved(tmp_path: Path, bad: float, strategy: Any) -> None:
    with pytest.raises(RuntimeError) as error:
        in_processes(fit, tmp_path, Poison(bad), strategy)
    assert "FloatingPointError: worker 1's head.bias is from" in str(error.value)
    assert [file.name for file in tmp_path.glob("*.ckpt")] == ["step=1.ckpt"]


EQUAL = {
    "compressed": lambda: CompressedStrategy(start_method="fork"),
    "partial": lambda: PartialBackpropStrategy(start_method="fork", cuts=["second"]),
    "island": lambda: GossipStrategy(start_method="fork", island=AllReduce(devices=2)),
}
SAID = "that differ between workers"


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["head.weight", "norm.running_var"])
@pytest.mark.parametrize("strategy", EQUAL)
def test_a_small_difference_is_said(
    tmp_path: Path, strategy: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A buffer is worker 0's again after the next update, and an island's devices have each their own."""
    in_processes(fit, tmp_path, Nudge(1e-6, name), EQUAL[strategy]())
    of_buffer = name == "norm.running_var"
    said = capsys.readouterr().err.count(SAID)
    assert said == (strategy != "island") if of_buffer else said >= 1


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", EQUAL)
def test_workers_that_train_rightly_are_equal_bit_for_bit(
    tmp_path: Path, strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    in_processes(fit, tmp_path, Nudge(0.0), EQUAL[strategy]())
    assert SAID not in capsys.readouterr().err
