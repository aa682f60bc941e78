"""Queues, codebooks and their pointers in the mean model: all are one worker's, and a worker's own again after it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_decentral import GossipStrategy
from lightning_decentral.gossip import FabricGossipStrategy
from tests.tiny import QUIET, Net, SizedBatches, in_processes

SIZE = 2


class Queue(nn.Module):
    """Embeddings of this worker's batches, the pointer to the oldest, and each row's label."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(7, 8))
        self.register_buffer("labels", torch.zeros(7, dtype=torch.long))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def put(self, rows: Tensor, labels: Tensor) -> None:
        places = (self.pointer + torch.arange(len(rows))) % len(self.rows)
        self.rows[places], self.labels[places] = rows, labels
        self.pointer[0] = int(places[-1] + 1) % len(self.rows)

    def fits(self) -> bool:
        """Whether each row has its own label, as it was put there."""
        return bool((self.rows[:, 0].round().long() == self.labels).all())


class Keeping(Net):
    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.queue = Queue()

    def keep(self, batch: Any) -> None:
        rows, labels = batch[0].clone(), batch[1] + 3 * self.global_rank
        rows[:, 0] = labels
        count = 2 + self.global_rank  # other places on each worker
        self.queue.put(rows[:count], labels[:count])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.keep(batch)
        return super().training_step(batch, batch_idx)


class Watch(Callback):
    """What each worker has before a validation, in it and afterwards."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._rows = folder, {}

    def _note(self, when: str, module: LightningModule) -> None:
        self._rows.setdefault(when, []).append({k: v.clone() for k, v in module.state_dict().items()})

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._rows["own"] = [{k: v.clone() for k, v in pl_module.state_dict().items()}]

    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if not trainer.sanity_checking:
            self._note("shown", pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._note("after", pl_module)
        trainer.save_checkpoint(self._folder / "saved.ckpt")
        torch.save(self._rows, self._folder / f"{trainer.global_rank}.pt")


def kept(folder: Path) -> tuple[list[dict[str, list[dict[str, Tensor]]]], dict[str, Tensor]]:
    rows = [torch.load(folder / f"{rank}.pt") for rank in range(SIZE)]
    return rows, torch.load(folder / "saved.ckpt", weights_only=True)["state_dict"]


def same(one: dict[str, Tensor], other: dict[str, Tensor], part: str) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one if name.startswith(part))


def fit(folder: Path) -> dict[str, Tensor]:
    trainer = Trainer(
        **QUIET, max_epochs=1, devices=SIZE, strategy=GossipStrategy(start_method="fork"), callbacks=[Watch(folder)]
    )
    module = Keeping()
    trainer.fit(module, SizedBatches(4), SizedBatches(1))
    return {k: v.clone() for k, v in module.state_dict().items()}


def test_a_queue_is_one_workers_where_the_mean_is_shown_saved_and_handed_back(tmp_path: Path) -> None:
    ended = in_processes(fit, tmp_path)
    workers, saved = kept(tmp_path)
    own = [row["own"][0] for row in workers]
    assert not torch.equal(own[0]["queue.rows"], own[1]["queue.rows"])
    assert int(own[0]["queue.pointer"]) != int(own[1]["queue.pointer"])
    for row, before in zip(workers, own, strict=True):
        assert same(row["shown"][0], own[0], "queue")  # worker 0's, pointer and all, on every worker
        assert same(row["after"][0], before, "queue")  # and each worker's own again
    assert same(saved, own[0], "queue")
    assert same(ended, own[0], "queue")
    mean = torch.stack([row["norm.running_mean"] for row in own]).mean(0)
    assert torch.allclose(saved["norm.running_mean"], mean)
    assert torch.allclose(workers[1]["shown"][0]["norm.running_mean"], mean)


class Poisoned(Watch):
    """Worker 0's queue holds NaN at the end: the first sound worker's is taken, as a whole."""

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        return

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *args)
        if trainer.global_step == 4 and trainer.global_rank == 0:
            pl_module.queue.rows[2] = torch.nan


def fit_poisoned(folder: Path) -> None:
    strategy = GossipStrategy(start_method="fork")
    trainer = Trainer(**QUIET, max_epochs=1, devices=SIZE, strategy=strategy, callbacks=[Poisoned(folder)])
    trainer.fit(Keeping(), SizedBatches(4), SizedBatches(1))


def test_a_poisoned_queue_is_replaced_with_its_pointer(tmp_path: Path) -> None:
    in_processes(fit_poisoned, tmp_path)
    workers, saved = kept(tmp_path)
    sound = workers[1]["own"][0]
    for found in (workers[0]["shown"][0], workers[0]["after"][0], saved):
        assert same(found, sound, "queue")


def loop(folder: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=SIZE, strategy=FabricGossipStrategy(start_method="fork"))
    fabric.launch(_loop, folder)


def _loop(fabric: Fabric, folder: Path) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 3), Queue())
    model, optimizer = fabric.setup(module[0], torch.optim.SGD(module.parameters(), lr=0.1))
    holder = fabric.setup_module(module[1])
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    rank = fabric.global_rank
    module[1].put(torch.full((rank + 1, 8), 1.0 + rank), torch.full((rank + 1,), 1 + rank))
    own = {k: v.clone() for k, v in module[1].state_dict().items()}
    with fabric.strategy.mean():
        shown = {k: v.clone() for k, v in module[1].state_dict().items()}
    after = {k: v.clone() for k, v in module[1].state_dict().items()}
    fabric.save(folder / "saved.ckpt", {"queue": holder, "model": model})
    torch.save((own, shown, after), folder / f"{rank}.pt")


def test_a_loop_with_fabric_does_the_same(tmp_path: Path) -> None:
    in_processes(loop, tmp_path)
    rows = [torch.load(tmp_path / f"{rank}.pt") for rank in range(SIZE)]
    assert int(rows[0][0]["pointer"]) != int(rows[1][0]["pointer"])
    for own, shown, after in rows:
        assert same(shown, rows[0][0], "")
        assert same(after, own, "")
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)
    assert same(saved["queue"], rows[0][0], "")


@pytest.mark.parametrize("count", [3, 5])
def test_the_queue_of_these_tests_keeps_rows_and_labels_together(count: int) -> None:
    queue = Queue()
    for first in range(4):
        labels = torch.arange(count) + first
        queue.put(labels[:, None].expand(-1, 8).float(), labels)
    assert queue.fits()
