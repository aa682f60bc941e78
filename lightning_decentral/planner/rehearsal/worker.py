"""One worker of a rehearsal: a module, its own copy of the data, and Lightning's own Trainer, which makes the same
calls as in a run. Lightning's own samplers distribute the data."""

import copy
import random
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_decentral.planner.rehearsal.binding import Binding, Common, Park
from lightning_decentral.planner.rehearsal.member import MemberPlace
from lightning_decentral.planner.rehearsal.turns import Ended

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "max_epochs": -1,
}
Module = TypeVar("Module", bound=LightningModule)


class KeepsNothing(DummyLogger):
    """Logger that discards a module's metrics; its folder is deleted with the crew."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder

    @property
    def save_dir(self) -> str:
        return self._folder

    root_dir = log_dir = save_dir


class RehearsedWorker:
    """Worker of a rehearsal, which trains its own copy of the module with a Trainer until an `error` ends it.
    ValueError: the module optimizes by hand."""

    def __init__(self, module: LightningModule, data: Any, place: MemberPlace, common: Common) -> None:
        if not module.automatic_optimization:
            raise ValueError(f"{type(module).__name__} optimizes by hand: only automatic optimization can be rehearsed")
        self.module, self._data, self._rank, self._common = module, data, place.worker, common
        self.error: BaseException | None = None
        self.binding = Binding(place, common)
        whole_nodes = place.workers % place.per_node == 0
        self._trainer = Trainer(
            **QUIET,
            devices=place.per_node if whole_nodes else place.workers,
            num_nodes=place.workers // place.per_node if whole_nodes else 1,
            max_steps=common.loop.run_steps,
            gradient_clip_val=common.loop.clip,
            strategy=self.binding,
            logger=KeepsNothing(common.folder),
            callbacks=[Park(self.binding)],
        )

    def goes_on(self) -> None:
        """Continue beyond the end of the run."""
        self._trainer.fit_loop.epoch_loop.max_steps = -1

    def run(self) -> None:
        """Run the whole fit, in the worker's thread."""
        self._common.turn.is_of(self._rank)
        given = "datamodule" if isinstance(self._data, LightningDataModule) else "train_dataloaders"
        try:
            with self._common.turn:
                self._trainer.fit(self.module, **{given: self._data})
            if len(self.binding.losses) < self._common.quota.allowed:  # the other workers would wait for this one
                self._common.close()
        except Ended:
            pass
        except BaseException as error:
            self.error = error
            self._common.close()
        finally:
            self._common.quota.done(self._rank)


def quiet(module: Module) -> Module:
    """Make the module's `self.log` and `self.log_dict` do nothing."""
    module.__dict__["log"] = module.__dict__["log_dict"] = lambda *_, **__: None
    return module


FEW = 1000  # Longest list that is copied: a longer one holds examples, which nothing changes.


class AskedTooSoon:
    """Stand-in for a Trainer, while data are set up once for all workers."""

    def __init__(self, data: LightningDataModule) -> None:
        self._name = type(data).__name__

    def __getattr__(self, name: str) -> Any:
        raise ValueError(
            f"{self._name} asks for trainer.{name} in prepare_data, setup or val_dataloader, which a rehearsal calls "
            "once for all workers: ask in train_dataloader"
        )


def copies_of(data: Any) -> Callable[[int], Any]:
    """Give each worker its own copy of the data; Lightning's samplers know how many workers there are, and the seed."""
    return lambda rank: own_copy(data, {})


def data_of(data: LightningDataModule | DataLoader[Any] | None) -> Any:
    """Data that workers get copies of: the loader, or the data module, set up; None: the module has its own loaders.
    ValueError: a data module asks for a worker's place too soon."""
    if isinstance(data, LightningDataModule):
        data = copy.copy(data)
        data.trainer = AskedTooSoon(data)  # type: ignore[assignment]
        data.prepare_data()
        data.setup("fit")
        # The data are prepared and set up once for all workers.
        vars(data).update(dict.fromkeys(["prepare_data", "setup"], lambda *_, **__: None))
    return data


def own_copy(value: Any, known: dict[int, Any]) -> Any:
    """Copy with counters, random generators and objects of its own; tensors, arrays and examples stay shared. `known`:
    copies by the ids of their originals, which grow. ValueError: it holds an iterator, which workers of one process
    would share."""
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
            return type(value)(own_copy(one, known) for one in value)
        case dict() if type(value) is dict and len(value) <= FEW:
            return {key: own_copy(one, known) for key, one in value.items()}
        case DataLoader() | Dataset() | Sampler() | LightningDataModule() | nn.Module():
            found = known[id(value)] = copy.copy(value)
            vars(found).update({name: own_copy(one, known) for name, one in vars(value).items()})
            return found
        case _:
            return value
