"""Data of each worker: an own copy of what a Trainer is given; Lightning's own samplers share it out."""

import copy
import random
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

Batches = Callable[[int], Any]
"""Batches of a rank: what `Trainer.fit` takes."""
FEW = 1000
"""Entries of a list: more are examples, which nobody changes."""
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
OWN = (DataLoader, Dataset, Sampler, LightningDataModule)


class AskedTooSoon:
    """Stand-in for a Trainer, while data are set up once for all workers."""

    def __init__(self, data: LightningDataModule) -> None:
        self._name = type(data).__name__

    def __getattr__(self, name: str) -> Any:
        raise ValueError(
            f"{self._name} asks for trainer.{name} in prepare_data, setup or val_dataloader, which a rehearsal calls "
            "once for all workers: ask in train_dataloader"
        )


def shared_out(loader: Any, workers: int, seed: int = 0) -> tuple[Batches, None]:
    """(each worker's own copy of the data, batches of an epoch: the loaders' own). Lightning's samplers know how many
    workers there are, and the seed."""
    return lambda rank: own_copy(loader), None


def data_of(data: LightningDataModule | DataLoader[Any] | None) -> Any:
    """Data that workers get copies of: the loader, or the data module, set up; None: the module has its own loaders.

    Raises:
        ValueError: a data module asks for a worker's place too soon.
    """
    if isinstance(data, LightningDataModule):
        data = copy.copy(data)
        data.trainer = AskedTooSoon(data)  # type: ignore[assignment]
        data.prepare_data()
        data.setup("fit")
        vars(data).update(prepare_data=_done, setup=_done)
    return data


def _done(*_: Any, **__: Any) -> None:
    """Do nothing: the data are prepared and set up for all workers."""


def own_copy(value: Any) -> Any:
    """Copy with counters, random generators and objects of its own; tensors, arrays and examples stay shared.

    Raises:
        ValueError: it holds an iterator, which workers of one process would share.
    """
    return _copied(value, {})


def _copied(value: Any, known: dict[int, Any]) -> Any:
    if id(value) not in known:
        known[id(value)] = _new(value, known)
    return known[id(value)]


def _new(value: Any, known: dict[int, Any]) -> Any:
    match value:
        case Generator():
            raise ValueError("data hold an iterator, which workers of one process would share: make it in __iter__")
        case torch.Generator() | np.random.Generator() | np.random.RandomState() | random.Random():
            return copy.deepcopy(value)
        case list() | tuple() | set() if type(value) in (list, tuple, set) and len(value) <= FEW:
            return type(value)(_copied(one, known) for one in value)
        case dict() if type(value) is dict and len(value) <= FEW:
            return {key: _copied(one, known) for key, one in value.items()}
        case DataLoader() | Dataset() | Sampler() | LightningDataModule() | nn.Module():
            return _object(value, known)
        case _:
            return value


def _object(value: Any, known: dict[int, Any]) -> Any:
    found = known[id(value)] = copy.copy(value)
    vars(found).update({name: _copied(one, known) for name, one in vars(value).items()})
    return found
