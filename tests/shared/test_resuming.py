"""What is each worker's own beside the model, and must be after a resume: its place in its data, its learning rate."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from lightning_decentral import CompressedStrategy, GossipStrategy, PartialBackpropStrategy
from lightning_decentral.gossip import Plain
from tests.tiny import QUIET, Batches, Net, SizedBatches, in_processes

STRATEGIES = {
    "gossip": GossipStrategy,
    "compressed, plain": partial(CompressedStrategy, codec=Plain()),
    "partial_backprop": partial(PartialBackpropStrategy, cuts=["second"]),
}


class OwnPace(SizedBatches):
    """Worker r has read 3 r + 1 more examples after each batch: workers stand at different places of their data."""

    def __iter__(self) -> Iterator[Any]:
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        for batch in range(6 if not self._resume else 6 - self._resume):
            self._index += 3 * rank + 1
            generator = torch.Generator().manual_seed(100 * rank + self._index)
            self._batch = batch
            yield [torch.randn(4, 8, generator=generator), torch.randint(0, 3, (4,), generator=generator)]

    def state_dict(self) -> dict[str, int]:
        return {"index": self._index, "taken": self._batch + 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._index, self._resume = state["index"], state["taken"]


class Plateau(Net):
    """The rate falls by a value of this worker's own, which gets worse on worker 1."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("own", float((2 * self.global_rank - 1) * self.trainer.global_step))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        schedule = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "own"}}


class Last(ModelCheckpoint):
    """Notes each worker's own parameters and rate, too."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        rate = torch.tensor(trainer.optimizers[0].param_groups[0]["lr"])
        own = {**{k: v.clone() for k, v in pl_module.state_dict().items()}, "rate": rate}
        torch.save(own, Path(str(self.dirpath)) / f"own-{trainer.global_rank}.pt")


def fit(folder: Path, strategy: str, module: type[Net], data: type[Batches], resume: Path | None, every: int) -> None:
    folder.mkdir(exist_ok=True)
    saved = Last(folder, "at-{step}", save_top_k=-1, every_n_train_steps=every)
    trainer = Trainer(
        **{**QUIET, "enable_checkpointing": True, "use_distributed_sampler": False},
        max_epochs=3 if module is Plateau else 1,
        devices=2,
        strategy=STRATEGIES[strategy](start_method="fork"),
        callbacks=[saved],
    )
    trainer.fit(module(dropout=0.0), data(), SizedBatches(1) if module is Plateau else None, ckpt_path=resume)


def resumed(folder: Path, *run: Any, at: int) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """What each worker has at the end of a whole run, and of one that is resumed."""
    in_processes(fit, folder / "whole", *run, None, at)
    in_processes(fit, folder / "resumed", *run, folder / "whole" / f"at-step={at}.ckpt", at)
    whole, again = ([torch.load(folder / name / f"own-{r}.pt") for r in range(2)] for name in ("whole", "resumed"))
    return whole, again


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_worker_goes_on_at_its_own_place_in_its_data(tmp_path: Path, strategy: str) -> None:
    whole, again = resumed(tmp_path, strategy, Net, OwnPace, at=4)
    assert all(map(same, whole, again))


def test_a_plateau_of_a_workers_own_value_goes_on_within_an_epoch(tmp_path: Path) -> None:
    whole, again = resumed(tmp_path, "gossip", Plateau, SizedBatches, at=10)
    assert [float(own["rate"]) for own in whole] == pytest.approx([0.1, 0.025])
    assert [float(own["rate"]) for own in again] == pytest.approx([0.1, 0.025])
    assert all(map(same, whole, again))


def test_what_a_plateau_loses_behind_a_save_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    resumed(tmp_path, "gossip", Plateau, SizedBatches, at=6)
    said = " ".join(capfd.readouterr().err.split())
    assert "resuming: ReduceLROnPlateau looks at own, which no checkpoint holds." in said


class Epochs(Callback):
    """Which epoch each batch is of."""

    def __init__(self, folder: Path) -> None:
        self._file, self._rows = folder / "epochs.pt", list[tuple[int, int]]()

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self._rows.append((trainer.current_epoch, trainer.global_step))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            torch.save(self._rows, self._file)


def fit_steps(folder: Path, strategy: str, resume: Path | None) -> None:
    folder.mkdir(exist_ok=True)
    saved = ModelCheckpoint(folder, "at-{step}", save_top_k=-1, every_n_train_steps=2)
    trainer = Trainer(
        **{**QUIET, "enable_checkpointing": True, "use_distributed_sampler": False},
        max_steps=8,
        devices=2,
        strategy=STRATEGIES[strategy](start_method="fork"),
        callbacks=[saved, Epochs(folder)],
    )
    data = TensorDataset(torch.randn(8, 8), torch.zeros(8, dtype=torch.long))
    trainer.fit(Net(dropout=0.0), DataLoader(data, batch_size=4), ckpt_path=resume)


@pytest.mark.parametrize("strategy", ["gossip", "compressed, plain"])
def test_epochs_of_a_resumed_run_have_the_numbers_of_the_whole_run(tmp_path: Path, strategy: str) -> None:
    """A sampler shuffles by them."""
    in_processes(fit_steps, tmp_path / "whole", strategy, None)
    in_processes(fit_steps, tmp_path / "resumed", strategy, tmp_path / "whole" / "at-step=2.ckpt")
    whole, again = (torch.load(tmp_path / name / "epochs.pt") for name in ("whole", "resumed"))
    assert again == [row for row in whole if row[1] >= 2]
