"""Every hook of Lightning's, and every attribute of its Trainer, is what it is in the run on processes."""

import inspect
import random
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress as Progress
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerState
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_decentral import GossipStrategy
from lightning_decentral.gossip import Ring
from lightning_decentral.planner.rehearsal.crew import Crew
from lightning_decentral.planner.rehearsal.loop_settings import LoopSettings
from lightning_decentral.planner.rehearsal.worker import copies_of, data_of
from tests.tiny import QUIET, in_processes

STEPS, WORKERS = 8, 2
"""Of five batches an epoch."""
NUDGE, CLIP = 1e-3, 0.3


def public(cls: type, of: type) -> set[str]:
    """Functions of a class that those who derive from it may write anew, but for what it has of another."""
    found = {name for name, _ in inspect.getmembers(cls, inspect.isfunction) if not name.startswith("_")}
    return found - set(dir(of))


HOOKS = public(LightningModule, nn.Module)
NEVER = {
    # A run without validation, tests, predictions, checkpoints and other loaders doesn't call these:
    *(name for name in HOOKS if any(part in name for part in ("val", "test", "predict", "checkpoint", "dataloader"))),
    # nor does it call what a module calls itself:
    *("all_gather", "freeze", "log", "log_dict", "lr_schedulers", "manual_backward", "optimizers", "print"),
    *("save_hyperparameters", "to_onnx", "to_tensorrt", "to_torchscript", "toggle_optimizer", "toggled_optimizer"),
    *("remove_ignored_hparams", "unfreeze", "untoggle_optimizer"),
    "configure_sharded_model",  # the older name of configure_model, which refuses to stand with it
}
DATA_HOOKS = public(LightningDataModule, object)
DATA_NEVER = {
    *(
        name
        for name in DATA_HOOKS
        if any(part in name for part in ("dataloader", "checkpoint", "state_dict", "hparams"))
    ),
    *("from_datasets", "on_exception", "save_hyperparameters"),
}
ONCE = {"prepare_data", "setup"}
"""Of the data, for all workers."""
OWN = {
    "callbacks": "those of a run aren't called",
    **dict.fromkeys(("logger", "loggers", "log_dir", "self.logger", "self.loggers"), "what is given is kept nowhere"),
    "strategy": "a worker's in a rehearsal, with the run's place, sums and values",
    "model": "the module itself, which ddp wraps up in a run",
    "strategy.model": "the same",
}
"""Attributes by which a rehearsal isn't the run, and why: all others are equal."""
OF_STRATEGIES = (
    *("root_device", "global_rank", "local_rank", "node_rank", "world_size", "is_global_zero"),
    *("num_nodes", "num_processes", "parallel_devices", "distributed_sampler_kwargs", "model", "optimizers"),
    *("lightning_module", "lr_scheduler_configs", "handles_gradient_accumulation", "restore_checkpoint_after_setup"),
)
ASKED_IN = ("setup", "configure_optimizers", "on_train_start", "on_before_optimizer_step", "on_train_epoch_end")
OBJECTS = {"trainer", "_trainer", "_data_fetcher", "_combined_loader", "_data_source", "_results", "_iter"}
"""Of Lightning's loops: objects without a value."""
FEW, DEEP = 5, 5


DOCUMENTED = {
    *("callback_metrics", "checkpoint_callback", "checkpoint_callbacks", "current_epoch", "datamodule", "device_ids"),
    *("early_stopping_callback", "early_stopping_callbacks", "estimated_stepping_batches", "evaluating", "global_rank"),
    *("global_step", "is_global_zero", "is_last_batch", "lightning_module", "local_rank", "log_dir", "logged_metrics"),
    *("logger", "loggers", "lr_scheduler_configs", "max_epochs", "max_steps", "min_epochs", "min_steps", "model"),
    *("node_rank", "num_devices", "num_nodes", "num_predict_batches", "num_sanity_val_batches", "num_test_batches"),
    *("num_training_batches", "num_val_batches", "optimizers", "precision", "predict_dataloaders", "predicting"),
    *("progress_bar_metrics", "sanity_checking", "scaler", "should_stop", "state", "strategy", "test_dataloaders"),
    *("testing", "train_dataloader", "training", "val_dataloaders", "validating", "world_size", "fit_loop", "profiler"),
}
"""https://lightning.ai/docs/pytorch/stable/common/trainer.html, and what its pages on hooks and strategies name."""


def is_property(of: object) -> bool:
    return isinstance(of, property)


class Traced(LightningModule):
    """Whose hooks say when they were called, draw random numbers, and move a weight."""

    moves = True

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.2), nn.Linear(6, 1))
        self.trace: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.log("loss", 1.0 * batch_idx)
        return (self.net(x) - y).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        falling = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        by_step = {"scheduler": falling, "interval": "step", "frequency": 3}
        return [optimizer], [by_step, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]

    @torch.no_grad()
    def called(self, name: str, *moment: Any) -> None:
        weight = self.net[0].weight
        gradient = None if weight.grad is None else float(weight.grad.double().sum())
        self.trace.append((name, *moment, float(weight.double().sum()), gradient))
        if self.moves and not name.startswith("configure_callbacks"):  # before seeds are set: a fork has random ones
            weight += NUDGE * (torch.rand(()) + np.random.rand() + random.random())


def traced(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = self if isinstance(self, Traced) else self.trainer.lightning_module
        module.called(name, module.current_epoch, module.global_step)
        found = hook(self, *args, **kwargs)
        module.called(f"{name} ended")
        return found

    return called


class Everything(Traced):
    """All hooks."""


for _name in HOOKS - NEVER:
    setattr(Everything, _name, traced(_name, getattr(Traced, _name)))


class Data(LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)


class TracedData(Data):
    """All hooks but those of other loaders."""


for _name in DATA_HOOKS - ONCE - DATA_NEVER:
    setattr(TracedData, _name, traced(f"data.{_name}", getattr(Data, _name)))


def shown(value: Any, depth: int = 0) -> Any:
    """What can be compared between two processes: values, types, and of objects what their attributes say."""
    match value:
        case Enum() | torch.device() | torch.dtype():
            return str(value)
        case None | bool() | int() | float() | str():
            return value
        case Tensor():
            return value.tolist() if value.numel() < FEW else tuple(value.shape)
        case dict():
            return {str(key): shown(one, depth + 1) for key, one in value.items()}
        case list() | tuple():
            return [shown(one, depth + 1) for one in value]
        case TrainerState() | _Loop() | Progress() if depth < DEEP:
            kept = {name: one for name, one in vars(value).items() if name not in OBJECTS and not callable(one)}
            return {name: shown(one, depth + 1) for name, one in kept.items()}
    return "a function" if callable(value) and not isinstance(value, nn.Module) else type(value).__name__


def asked(of: Any, name: str) -> Any:
    try:
        return shown(getattr(of, name))
    except Exception as error:  # of another stage, or without a file
        return f"{type(error).__name__}: {error}"


def attributes(of: Any) -> dict[str, Any]:
    """All that have no underscore, whether a class or an instance has them."""
    return {name: asked(of, name) for name in dir(of) if not name.startswith("_")}


class Asking(Traced):
    """What hooks see of their Trainer, its strategy and the module itself."""

    moves = False

    def asks(self) -> None:
        strategy = {f"strategy.{name}": asked(self.trainer.strategy, name) for name in OF_STRATEGIES}
        own = {f"self.{name}": asked(self, name) for name, _ in inspect.getmembers(LightningModule, is_property)}
        self.trace.append({**attributes(self.trainer), **strategy, **own})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.asks()
        return super().training_step(batch, batch_idx)


def asking(hook: Callable[..., Any]) -> Callable[..., Any]:
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.asks()
        return hook(self, *args, **kwargs)

    return called


for _name in ASKED_IN:
    setattr(Asking, _name, asking(getattr(Traced, _name)))


class Kept(Callback):
    """Of each worker, before the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        torch.save(pl_module.trace, self._folder / f"{trainer.global_rank}.pt")


KINDS: dict[str, tuple[type[Strategy], dict[str, Any]]] = {
    "gossip": (GossipStrategy, {"topology": Ring()}),
    "ddp": (DDPStrategy, {}),
}


def fit(folder: Path, make: type[Traced], data: type[Data], name: str) -> None:
    seed_everything(1, workers=True, verbose=False)
    kind, options = KINDS[name]
    asked = {**QUIET, "limit_val_batches": 0, "max_steps": STEPS, "max_epochs": -1, "gradient_clip_val": CLIP}
    strategy = kind(start_method="fork", **options)
    Trainer(**asked, devices=WORKERS, strategy=strategy, callbacks=[Kept(folder)]).fit(make(), datamodule=data())


def rehearsed(make: type[Traced], data: type[Data], name: str) -> list[list[Any]]:
    seed_everything(1, workers=True, verbose=False)
    kind, options = KINDS[name]
    batches, loop = copies_of(data_of(data())), LoopSettings(CLIP, 1.0, STEPS)
    with Crew(make(), batches, kind(**options), WORKERS, STEPS, per_node=WORKERS, loop=loop) as crew:
        crew.train(STEPS)
        return [worker.module.trace for worker in crew.workers]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "data"), [("gossip", TracedData), ("ddp", Data)])
def test_every_hook_is_called_when_it_is_in_a_run(tmp_path: Path, name: str, data: type[Data]) -> None:
    """At the same moment, with the same gradients and random numbers, so that what it changes is the same."""
    in_processes(fit, tmp_path, Everything, data, name)
    called = set()
    for rank, trace in enumerate(rehearsed(Everything, data, name)):
        real = torch.load(tmp_path / f"{rank}.pt")
        called |= {entry[0] for entry in real}
        end = [entry[0] for entry in real].index("on_train_end ended")  # then a run of gossip takes the workers' mean
        assert trace[:end] == real[:end]
    given = DATA_HOOKS - ONCE - DATA_NEVER if data is TracedData else set()
    # A data module's hook takes the place of the module's. A new one has to be looked at.
    names = {f"data.{hook}" for hook in given} | (HOOKS - NEVER - given)
    assert names - called <= {"teardown", "data.teardown"}


@pytest.mark.parametrize("name", KINDS)
def test_every_attribute_of_the_trainer_is_a_runs(tmp_path: Path, name: str) -> None:
    """What Lightning's documentation names, and all else; what isn't equal is known by name, and stays so."""
    in_processes(fit, tmp_path, Asking, Data, name)
    other = set()
    for rank, trace in enumerate(rehearsed(Asking, Data, name)):
        real = torch.load(tmp_path / f"{rank}.pt")
        assert set(real[0]) >= DOCUMENTED
        assert len(real) >= 2 * STEPS
        for there, here in zip(real, trace, strict=True):
            assert set(there) == set(here)
            other |= {what for what in there if there[what] != here[what]}
    assert other == set(OWN) - ({"model", "strategy.model"} if name == "gossip" else set())


class Saving(Traced):
    def on_train_epoch_end(self) -> None:
        self.trainer.save_checkpoint("best.ckpt")


class Drawing(Traced):
    def on_train_epoch_end(self) -> None:
        logger: Any = self.logger
        assert self.trainer.log_dir == logger.save_dir == logger.log_dir
        self.trace.append(file := Path(logger.log_dir, f"{self.current_epoch}.txt"))
        file.write_text("a picture")


def test_a_checkpoint_that_a_module_saves_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be written over the run's own, by each of some ten trainings."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"Saving saves .*best.ckpt, and a rehearsal trains many times and keeps n"):
        rehearsed(Saving, Data, "gossip")
    assert not list(tmp_path.iterdir())


def test_what_is_written_where_the_logger_is_goes_with_the_rehearsal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {entry for trace in rehearsed(Drawing, Data, "gossip") for entry in trace}
    assert {file.name for file in files} == {"0.txt", "1.txt"}  # of an epoch each
    assert not any(file.parent.exists() for file in files)
    assert not list(tmp_path.iterdir())
