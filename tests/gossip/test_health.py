"""A worker's NaN, infinity or absurd number, put in behind an update, never reaches what is validated or saved."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_decentral import GossipStrategy
from lightning_decentral.gossip import AllReduce, Complete, Gossip, Ring, Topology
from tests.tiny import QUIET, Batches, Net, SizedBatches, in_processes

STEPS, SIZE = 4, 4


class Poison(Callback):
    """After the last update, where what is in flight was sent before: a checkpoint, a validation and the end follow."""

    def __init__(self, folder: Path, bad: float, name: str, sick: tuple[int, ...]) -> None:
        self._folder, self._bad, self._name, self._sick = folder, bad, name, sick

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == STEPS:
            if trainer.global_rank in self._sick:
                with torch.no_grad():
                    pl_module.state_dict()[self._name].view(-1)[0] = self._bad
            torch.save(copied(pl_module), self._folder / f"{trainer.global_rank}.pt")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.save(copied(pl_module), self._folder / f"validated-{trainer.global_rank}.pt")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            (self._folder / "left_out").write_text(str(trainer.strategy.traffic().left_out))  # type: ignore[attr-defined]


def copied(module: LightningModule) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in module.state_dict().items()}


def fit(folder: Path, poison: Poison, options: dict[str, Any]) -> dict[str, Tensor]:
    module = Net()
    settings = {**QUIET, "enable_checkpointing": True, "max_steps": STEPS, "val_check_interval": STEPS}
    Trainer(
        **settings,
        default_root_dir=folder,
        devices=SIZE,
        strategy=GossipStrategy(start_method="fork", **options),
        callbacks=[poison, ModelCheckpoint(folder, filename="last", every_n_train_steps=STEPS)],
    ).fit(module, Batches(STEPS), Batches(1))
    return copied(module)


def assert_mean_of_healthy(folder: Path, found: dict[str, Tensor], sound: list[int]) -> None:
    rows = [torch.load(folder / f"{rank}.pt") for rank in sound]
    for key, value in found.items():
        if value.is_floating_point():
            torch.testing.assert_close(value, torch.stack([row[key] for row in rows]).mean(0), msg=key)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("bad", "name", "delay", "topology"),
    [
        (float("nan"), "head.weight", 0, Ring()),
        (float("inf"), "norm.running_var", 3, Ring()),
        (1e30, "head.bias", 1, Complete()),
    ],
    ids=str,
)
def test_the_mean_is_that_of_the_healthy(tmp_path: Path, bad: float, name: str, delay: int, topology: Topology) -> None:
    options: dict[str, Any] = {"delay": delay, "topology": topology, "heals": 0}
    if delay > 1:
        options["combine"] = Gossip(rate=0.4)
    in_processes(fit, tmp_path, Poison(tmp_path, bad, name, (1,)), options, seconds=90)
    assert_mean_of_healthy(tmp_path, torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"], [0, 2, 3])
    assert_mean_of_healthy(tmp_path, torch.load(tmp_path / "validated-0.pt"), [0, 2, 3])
    assert int((tmp_path / "left_out").read_text()) >= 2  # the checkpoint's mean and the validation's


def test_an_island_is_left_out_as_a_whole(tmp_path: Path) -> None:
    options = {"island": AllReduce(devices=2), "delay": 0}
    in_processes(fit, tmp_path, Poison(tmp_path, float("nan"), "head.weight", (3,)), options, seconds=90)
    assert_mean_of_healthy(tmp_path, torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"], [0, 1])


class Edges(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", torch.tensor([-torch.inf, 0.0, torch.inf]))
        self.register_buffer("unknown", torch.tensor([torch.nan]))


@pytest.mark.parametrize("evaluate", ["mean", "own"])
def test_constants_that_are_not_finite_are_validated_and_saved(tmp_path: Path, evaluate: str) -> None:
    saving = ModelCheckpoint(tmp_path, filename="last")
    settings = {**QUIET, "enable_checkpointing": True, "devices": 2, "max_epochs": 1, "callbacks": [saving]}
    trainer = Trainer(**settings, strategy=GossipStrategy(start_method="fork", evaluate=evaluate))
    in_processes(trainer.fit, Edges(), SizedBatches(2), SizedBatches(1))
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert saved["edges"].tolist() == [-torch.inf, 0.0, torch.inf]
    assert saved["unknown"].isnan().all()


def test_a_mean_of_nobody_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"none of the 4 .* sound model \(head.bias of worker 0 holds NaN\)"):
        in_processes(fit, tmp_path, Poison(tmp_path, float("nan"), "head.bias", (0, 1, 2, 3)), {}, seconds=90)
    assert not (tmp_path / "last.ckpt").exists()
