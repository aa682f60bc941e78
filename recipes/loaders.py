"""Data loaders: three fixed splits, served to each worker in equal batches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence, Sized
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Subset

from lightning_decentral.shared.plan.arguments import at_least

SPLITS = ("train", "validation", "test")


class Examples(Sized, Protocol):
    """What a DataLoader asks of a map-style dataset."""

    def __getitem__(self, index: int) -> Any:
        """One (input, target) pair."""


def split_indices(count: int, lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Disjoint random index lists below `count`: one of each length, after the list of all the rest.

    The same for equal arguments on every worker and machine.
    """
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    ends = list(accumulate(lengths, initial=0))
    return [order[ends[-1] :], *(order[start:end] for start, end in pairwise(ends))]


def split(examples: Examples, lengths: Sequence[int], seed: int) -> list[Examples]:
    """`split_indices` as views of the examples."""
    return [Subset(examples, indices) for indices in split_indices(len(examples), lengths, seed)]  # type: ignore[arg-type]


def refuse_empty(splits: Mapping[str, Sized], owner: str) -> None:
    """ValueError that names the first split without examples."""
    for name, examples in splits.items():
        if len(examples) == 0:
            raise ValueError(f"the {name} split of {owner} has no examples: check the files it reads")


class Loaders(LightningDataModule):
    """`batch_size` examples per worker and step; which worker reads which example is Lightning's distributed sampler's.

    `sizes` names what the data decide of a model's configuration. Raises ValueError where a split leaves a worker
    without a batch. `num_workers` counts reading processes, as in torch.
    """

    def __init__(self, *, batch_size: int, num_workers: int = 0, seed: int = 0) -> None:
        super().__init__()
        at_least(1, "give data.batch_size=1 or more", batch_size=batch_size)
        at_least(0, "0 reads in the worker itself", num_workers=num_workers)
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.seed = seed
        self.splits: dict[str, Examples] = {}

    @property
    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Options of the model's configuration that follow from the data."""

    @abstractmethod
    def read(self) -> Sequence[Examples]:
        """The examples for training, validation and test."""

    def setup(self, stage: str) -> None:
        """Read all splits once and refuse empty ones."""
        if not self.splits:
            self.splits = dict(zip(SPLITS, self.read(), strict=True))
        refuse_empty(self.splits, type(self).__name__)

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled; the last incomplete batch is dropped, so that every step of every worker has equal weight."""
        examples, workers = self.splits["train"], self._workers()
        share = -(-len(examples) // workers)
        if share < self.batch_size:
            raise ValueError(
                f"{len(examples)} training examples give {workers} workers {share} each, less than one batch of "
                f"{self.batch_size}: set data.batch_size={share} or lower"
            )
        return self._loader("train", shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """In order."""
        return self._loader("validation")

    def test_dataloader(self) -> DataLoader[Any]:
        return self._loader("test")

    def _loader(self, name: str, *, shuffle: bool = False, drop_last: bool = False) -> DataLoader[Any]:
        return DataLoader(
            self.splits[name],  # type: ignore[arg-type]
            batch_size=self.batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )

    def _workers(self) -> int:
        return self.trainer.world_size if self.trainer else 1
