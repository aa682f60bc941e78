"""A file that one strategy wrote is resumed by every other: its model and its optimizer are there, what isn't is named.

Workers that had diverged have states of their own next to their file: another strategy goes on from their mean.
"""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_decentral import (
    CompressedStrategy,
    GossipStrategy,
    PartialBackpropStrategy,
    SpilledStrategy,
    TokenPipelineStrategy,
)
from lightning_decentral.gossip import Complete, DifferenceCompression, Every, GossipReplicas, Int8, OuterNesterov
from lightning_decentral.pipeline import Uniform
from lightning_decentral.shared.compute.worker_state import KEY
from tests.pipeline.training import Language
from tests.tiny import QUIET, in_processes

FORK: dict[str, Any] = {"start_method": "fork"}
SLICED: dict[str, Any] = {**FORK, "slicing": Uniform(1)}
STRATEGIES: dict[str, tuple[Callable[[], Any], int]] = {
    "one process": (lambda: "auto", 1),
    "ddp": (lambda: "ddp_fork", 2),
    "gossip": (lambda: GossipStrategy(**FORK), 2),
    "differences": (lambda: GossipStrategy(codec=DifferenceCompression(Int8()), **FORK), 2),
    "outer": (lambda: GossipStrategy(combine=OuterNesterov(), topology=Every(2, Complete()), **FORK), 2),
    "compressed": (lambda: CompressedStrategy(**FORK), 2),
    "partial": (lambda: PartialBackpropStrategy(cuts=1, **FORK), 2),
    "stages": (lambda: TokenPipelineStrategy(**SLICED), 2),
    "pipelines": (lambda: TokenPipelineStrategy(stages=1, replicas=GossipReplicas(), **SLICED), 2),
    "spilled": (SpilledStrategy, 1),
}
LIGHTNINGS_OWN = ("one process", "ddp")  # these print nothing of what a file has in addition
SAVED = 2


class Resumed(Callback):
    """Compares worker 0's model at its first step with the file's, or with what it had itself; and its optimizer."""

    def __init__(self, file: Path) -> None:
        self._whole = torch.load(file)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        mark, size = self._whole.get(KEY, {}), trainer.world_size
        own_states = mark.get("id") and getattr(trainer.strategy, "drifts", False) and mark["size"] == size
        if trainer.global_step == SAVED and trainer.is_global_zero and not own_states:
            model, saved = pl_module.state_dict(), self._whole["state_dict"]
            assert model.keys() <= saved.keys()
            assert all(torch.equal(value, saved[key]) for key, value in model.items())
        states = trainer.optimizers[0].state.values()
        # Under partial_backprop a parameter takes only the steps that train it.
        assert max(int(state["step"]) for state in states) == trainer.global_step
        assert states


def fit(name: str, folder: Path, resume: Path | None) -> None:
    make, devices = STRATEGIES[name]
    seen: Callback = Resumed(resume) if resume else ModelCheckpoint(folder, "{step}", every_n_train_steps=SAVED)
    options = {**QUIET, "enable_checkpointing": resume is None, "max_steps": SAVED + (resume is not None)}
    trainer = Trainer(**options, devices=devices, strategy=make(), callbacks=[seen])
    trainer.fit(Language(dtype=torch.float32), ckpt_path=resume)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """File of each strategy, written when it is first asked for."""
    folder = tmp_path_factory.mktemp("files")

    def file(name: str) -> Path:
        path = folder / name / f"step={SAVED}.ckpt"
        if not path.exists():
            in_processes(fit, name, path.parent, None)
        return path

    return file


@pytest.mark.sampled
@pytest.mark.parametrize(("writer", "reader"), [*product(STRATEGIES, STRATEGIES)])
def test_every_strategy_goes_on_from_the_file_of_every_other(
    writer: str, reader: str, files: Callable[[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = files(writer)
    capfd.readouterr()
    in_processes(fit, reader, tmp_path, file)
    printed = capfd.readouterr().err
    diverged = bool(torch.load(file).get(KEY, {}).get("id"))
    if writer == reader and diverged:
        assert "every worker resumes from its own state" in printed
    elif reader not in LIGHTNINGS_OWN:
        assert ("start from the mean" in printed or "training resumes from their mean" in printed) == diverged
