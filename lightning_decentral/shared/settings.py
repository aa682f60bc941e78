"""Settings that all workers must share: collected from strategy, Trainer and callbacks, and compared before training.

Every constructor argument must be equal on all workers, but for those named here. Used by Trainers of a fixed number of
workers (`SameSettings`), by Fabric, and by elastic workers as they join."""

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import lightning.pytorch as lightning
import torch
from lightning.pytorch import Trainer, callbacks
from torch.optim import Optimizer

import lightning_decentral
from lightning_decentral.shared.plan.described import constructed, describe_by_repr, described
from lightning_decentral.shared.refusals import own_bases
from lightning_decentral.shared.wire.meeting.comparison import check_same_settings
from lightning_decentral.shared.wire.transport import connected, everyone

if TYPE_CHECKING:
    import lightning_decentral.shared.setup_and_step as strategies

OF_ONE_WORKER = (
    *("logger", "callbacks", "default_root_dir", "enable_progress_bar", "enable_model_summary", "log_every_n_steps"),
    *("profiler", "deterministic", "benchmark", "num_nodes", "strategy"),
)
"""Trainer arguments that may differ between workers, as no worker waits for another because of them."""
OF_LIGHTNING = (
    *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"),
    *("process_group_backend", "start_method", "precision"),
)
"""Strategy arguments that the Trainer gives, or that choose how processes start; only their effects are compared."""
PLACES = ("dirpath", "filename", "verbose", "auto_insert_metric_name", "enable_version_counter", "log_rank_zero_only")
"""Arguments of callbacks that may differ between workers; worker 0's are used."""
MEETING = (
    *(callbacks.Checkpoint, callbacks.EarlyStopping, callbacks.GradientAccumulationScheduler, callbacks.Timer),
    *(callbacks.StochasticWeightAveraging, callbacks.WeightAveraging),
)
"""Lightning's callbacks that make workers wait for each other, end training, or accumulate gradients."""
PLAIN = (type(None), bool, int, float, str, timedelta)
PATIENCE = timedelta(minutes=30)

describe_by_repr(torch.dtype, torch.device, torch.Size)


class SameSettings:
    """Compares the settings of one strategy's workers, three times before they train; a single worker compares nothing.
    ValueError: settings differ; every worker raises the same line with the first difference."""

    def __init__(self, worker: "strategies.WorkersStrategy") -> None:
        self._worker = worker
        self._asked = True

    def plan(self) -> None:
        """Compare versions, strategy, Trainer and callbacks, as soon as the process group exists."""
        self._asked = False
        if connected():
            trainer = self._worker._module.trainer
            self._compare(
                {**versions(), **of_strategy(self._worker), **of_trainer(trainer), **of_callbacks(trainer)}, "set-up"
            )

    def resuming(self, given: bool) -> None:
        """Compare whether a checkpoint is given, before any worker reads it: once after each `plan`."""
        if not self._asked:
            self._asked = True
            self._compare({"ckpt_path": "given" if given else "None"}, "the checkpoint")

    def optimizers(self) -> None:
        """Compare the optimizers once they exist and the data are attached."""
        trainer: Any = self._worker._module.trainer
        source = trainer.fit_loop.epoch_loop.val_loop._data_source.instance
        # In a validation all workers wait for each other. A loader isn't tested by `not`: that asks for its length.
        validates = trainer.enable_validation and not (isinstance(source, list | tuple | dict) and not source)
        validated = {"val_dataloaders": "given" if validates else "None"}
        self._compare({**validated, **of_optimizers(self._worker.optimizers, self._worker.own)}, "the optimizers")

    def _compare(self, mine: dict[str, str], when: str) -> None:
        compare(mine, self._worker._timeout or PATIENCE, when)


def compare(mine: dict[str, str], timeout: timedelta, when: str) -> None:
    """Compare settings among a fixed number of workers; errors as `check_same_settings`. Collective."""
    if connected():
        over = everyone()
        check_same_settings(mine, over.store, over.rank, over.size, timeout, when)


def versions() -> dict[str, str]:
    """Return the versions of packages that decide how workers communicate; torch's without its build."""
    return {
        "lightning_decentral": lightning_decentral.__version__,
        "torch": torch.__version__.split("+")[0],
        "lightning": lightning.__version__,
    }


def of_strategy(strategy: Any) -> dict[str, str]:
    """Settings of a Trainer's strategy, among a fixed number of workers."""
    return {**of_method(strategy, strategy.precision_plugin), **of_place(strategy)}


def of_method(strategy: Any, precision: Any) -> dict[str, str]:
    """Settings of a Trainer's or Fabric's strategy, as text: {argument: class or value, argument.part: ...}."""
    parts = constructed(strategy, own_bases(type(strategy)), skip=(*strategy.own, *OF_LIGHTNING))
    found = {"strategy": type(strategy).__qualname__}
    for name, part in parts.items():
        found |= described(part, name)
    return found | described(precision, "precision_plugin")


def of_optimizers(optimizers: Sequence[Optimizer], own: Sequence[str] = ()) -> dict[str, str]:
    """Settings of the optimizers, without those in `own`, which may differ between workers."""
    found = {
        "optimizers": f"[{', '.join(type(optimizer).__qualname__ for optimizer in optimizers)}]",
        "parameters of the optimizers": str([sum(len(g["params"]) for g in o.param_groups) for o in optimizers]),
    }
    return {name: text for name, text in found.items() if name not in own}


def of_place(strategy: Any) -> dict[str, str]:
    """Numbers of devices, nodes and workers, process group backend and type of device, as text."""
    layout = {"devices": strategy.num_processes, "nodes": strategy.num_nodes, "workers": strategy.world_size}
    backend = {"process_group_backend": strategy.process_group_backend, "device": strategy.root_device.type}
    return {name: str(value) for name, value in (layout | backend).items()}


def of_trainer(trainer: Trainer) -> dict[str, str]:
    """Plain arguments of the Trainer's constructor, but for those that may differ (`OF_ONE_WORKER`)."""
    found = {"entry": str(trainer.state.fn and trainer.state.fn.value)}
    for name, value in constructed(trainer, [Trainer], skip=OF_ONE_WORKER).items():
        if isinstance(value, PLAIN):
            found[name] = repr(value)
    found["use_distributed_sampler"] = str(trainer._accelerator_connector.use_distributed_sampler)
    return found


def of_callbacks(trainer: Any) -> dict[str, str]:
    """Settings of the callbacks that make workers wait for each other: Lightning's own and this package's."""
    met = [
        c for c in trainer.callbacks if isinstance(c, MEETING) or type(c).__module__.startswith("lightning_decentral")
    ]
    counted: Counter[str] = Counter()
    found: dict[str, str] = {}
    for callback in met:
        kind = type(callback).__qualname__
        name = f"{kind}[{counted[kind]}]" if counted[kind] else kind
        found[name] = "given"
        for argument, part in constructed(callback, type(callback).__mro__[:-1], skip=PLACES).items():
            found |= described(part, f"{name}.{argument}")
        counted[kind] += 1
    return found
