"""A training that is resumed, whoever resumes it, goes on in the W&B run of its checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, WandbLogger

from lightning_decentral import GossipStrategy
from lightning_decentral.shared import runs
from tests.tiny import QUIET, Quadratic, in_processes
from tests.wandb_file import history, run


def fit(folder: Path, steps: int, **given: Any) -> None:
    """One worker, which saves at every tenth step."""
    logger = WandbLogger(project="t", save_dir=folder, offline=True, id=given.pop("id", None))
    saving = ModelCheckpoint(folder, filename="last", every_n_train_steps=10, enable_version_counter=False)
    options = {**QUIET, "enable_checkpointing": True, "max_steps": steps, "log_every_n_steps": 1, "devices": 1}
    options |= {"strategy": GossipStrategy(), "logger": [CSVLogger(folder), logger]}
    Trainer(**options, callbacks=[saving]).fit(Logged(), ckpt_path=given.get("path"))
    wandb.finish()


class Logged(Quadratic):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def first(folder: Path) -> None:
    fit(folder, 10)


def resumed(folder: Path) -> None:
    fit(folder, 20, path=str(folder / "last.ckpt"))


def with_an_id(folder: Path) -> None:
    fit(folder, 30, path=str(folder / "last.ckpt"), id="own")


def test_a_resumed_training_goes_on_in_its_run_and_an_id_of_the_users_own_stays(tmp_path: Path) -> None:
    for part in (first, resumed, with_an_id):
        in_processes(part, tmp_path)
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    ids = [run(file).run_id for file in files]
    assert ids[0] == ids[1] != ids[2] == "own"
    steps = [[row["trainer/global_step"] for row in history(file) if "loss" in row] for file in files]
    assert steps == [[*range(10)], [*range(10, 20)], [*range(20, 30)]]


def test_a_checkpoint_is_looked_into_but_not_loaded(tmp_path: Path) -> None:
    class Refuses:
        def __reduce__(self) -> Any:
            return pytest.fail, ("it was loaded",)

    for name, content in (("a", {runs.KEY: '["x", null]', "weight": torch.ones(3), "z": Refuses()}), ("b", {"c": "d"})):
        torch.save(content, tmp_path / name)
    assert [runs.kept_in(str(tmp_path / name)) for name in "ab"] == [["x", None], []]
    (tmp_path / "c").write_text("no checkpoint")
    assert [runs.kept_in(str(tmp_path / name)) for name in ("c", "missing", "")] == [[], [], []]
