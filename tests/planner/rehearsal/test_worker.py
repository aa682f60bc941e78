"""Each worker's data in one process are those that it has in a process of its own."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from lightning_decentral import GossipStrategy
from lightning_decentral.planner.rehearsal import rehearse
from lightning_decentral.planner.rehearsal.crew import Crew
from lightning_decentral.planner.rehearsal.loop_settings import LoopSettings
from lightning_decentral.planner.rehearsal.worker import copies_of
from tests.gossip.test_lightning import Inspect, seen
from tests.tiny import QUIET, in_processes

STEPS, WORKERS, BATCH = 7, 2, 4
ROWS = torch.randn(3 * WORKERS * BATCH, 4, generator=torch.Generator().manual_seed(0))


class Line(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.layer(batch) - 1).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Drawn(Dataset[Tensor]):
    """From all generators there are, two of its own, and a count."""

    def __init__(self) -> None:
        self.own, self.of_torch, self.count = np.random.default_rng(1), torch.Generator().manual_seed(2), 0

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> Tensor:
        self.count += 1
        drawn = torch.rand(()) + np.random.rand() + random.random() + self.own.random()
        return ROWS[index] * (drawn + torch.rand((), generator=self.of_torch) + 0.01 * self.count)


class Stream(IterableDataset[Tensor]):
    """Shares itself out, as torch's documentation has it."""

    def __iter__(self) -> Iterator[Tensor]:
        place = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        yield from ROWS[slice(place[0], None, place[1])]


LOADERS = {
    "drawn": lambda: DataLoader(Subset(Drawn(), range(len(ROWS))), BATCH, shuffle=True),
    "by loaders' workers": lambda: DataLoader(Drawn(), BATCH, num_workers=1),
    "stream": lambda: DataLoader(Stream(), BATCH),
}


def fit(folder: Path, name: str) -> None:
    seed_everything(1, workers=True, verbose=False)
    strategy, asked = GossipStrategy(start_method="fork"), {**QUIET, "max_steps": STEPS, "max_epochs": -1}
    trainer = Trainer(**asked, devices=WORKERS, strategy=strategy, callbacks=[Inspect(folder)])
    trainer.fit(Line(), LOADERS[name]())


@pytest.mark.parametrize("name", LOADERS)
def test_batches_are_those_of_processes(tmp_path: Path, name: str) -> None:
    in_processes(fit, tmp_path, name)
    seed_everything(1, workers=True, verbose=False)
    batches = copies_of(LOADERS[name]())
    with Crew(Line(), batches, GossipStrategy(), WORKERS, STEPS, loop=LoopSettings(None, 1.0, STEPS)) as crew:
        crew.train(STEPS)
        crew.release()
    for real, worker in zip(seen(tmp_path, WORKERS), crew.workers, strict=True):
        for key, value in worker.module.state_dict().items():
            assert torch.equal(real["own"][key], value), key
    assert not torch.equal(*(worker.module.layer.weight for worker in crew.workers))


def test_a_copy_has_its_own_state_and_the_same_examples() -> None:
    loader = LOADERS["drawn"]()
    copies = [copies_of(loader)(rank) for rank in range(2)]
    inner = [copy.dataset.dataset for copy in copies]
    assert inner[0] is not inner[1]
    assert copies[0].sampler.data_source is copies[0].dataset
    assert [float(one.own.random()) for one in inner] == [float(np.random.default_rng(1).random())] * 2
    loader.dataset.dataset.rows = ROWS
    assert copies_of(loader)(0).dataset.dataset.rows is ROWS


def test_an_iterator_in_the_data_is_refused() -> None:
    class Held(Stream):
        def __init__(self) -> None:
            self.rows = (row for row in ROWS)

    with pytest.raises(ValueError, match="data hold an iterator"):
        copies_of(DataLoader(Held(), BATCH))(0)


def test_a_data_module_that_asks_for_its_place_too_soon_is_refused() -> None:
    class Sharded(LightningDataModule):
        def setup(self, stage: str) -> None:
            self.rows = ROWS[self.trainer.global_rank :: self.trainer.world_size]

        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(self.rows, BATCH)

    with pytest.raises(ValueError, match=r"Sharded asks for trainer.global_rank in prepare_data, setup"):
        rehearse(Line(), Sharded(), workers=[2], target=0.0, validation=DataLoader(ROWS))


def test_a_data_module_shares_itself_out_in_its_loader() -> None:
    class Sharded(LightningDataModule):
        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(Stream(), BATCH) if self.trainer.world_size == WORKERS else DataLoader(ROWS[:0])

    found = rehearse(
        Line(), Sharded(), workers=[WORKERS], target=0.0, methods=[], steps=10, rates=[1.0], seeds=1,
        validation=DataLoader(ROWS),
    )  # fmt: skip
    assert [row.title for row in found.rows] == ["ddp"]
