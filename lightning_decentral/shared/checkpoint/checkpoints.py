"""Base class of saving and resuming under all methods; `resuming_replicas` has the one for workers with whole models.

The mean model is saved to one plain file, which loads without this package, each worker's own state next to it. These
are written first, and the plain file is renamed last: until then the checkpoint before it is whole, whoever is killed.

Saving is collective (Lightning calls it on every worker) and doesn't change how workers train on. Resuming on the same
number of workers continues bit for bit on CPU; on another number all start from the mean."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.trainer.call import _interrupt
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import _TunerExitException

from lightning_decentral.shared.checkpoint import runs, store
from lightning_decentral.shared.checkpoint.reading import Reading
from lightning_decentral.shared.checkpoint.saving import CheckpointedStrategy, Saving
from lightning_decentral.shared.compute import worker_state
from lightning_decentral.shared.compute.carried import carried
from lightning_decentral.shared.refusals import refuse_backend
from lightning_decentral.shared.wire.mean import MeanModel, mean_of_states
from lightning_decentral.shared.wire.meeting.placement import adapt

OF_MODELS = ("state_dict", "current_model_state")  # WeightAveraging moves the module's state to the second key


class Checkpoints(ABC):
    """Saves and resumes one worker, alike for all methods."""

    def __init__(self, worker: CheckpointedStrategy, mean_model: MeanModel) -> None:
        self._worker, self._mean_model = worker, mean_model  # `mean_model`: saved to the plain file
        self._random: tuple[dict[str, Any], bool] | None = None  # (state, saved within an epoch)
        self._saving, self._reading = Saving(worker), Reading(worker)

    @abstractmethod
    def save(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any) -> None:
        """Write the plain file (worker 0) and, where workers differ and more than weights is saved, each worker's own
        file. Collective."""

    @abstractmethod
    def load(self, path: str | Path, weights_only: bool | None) -> dict[str, Any]:
        """Read the checkpoint that Lightning restores from; the rest is kept for `resume` and `start`. Collective.
        ValueError: the file is damaged."""

    @abstractmethod
    def resume(self) -> None:
        """Restore the rest of the state after set-up."""

    @abstractmethod
    def start(self) -> None:
        """Restore rounds and random state when training starts, once callbacks have restored what is trained."""

    def remove(self, filepath: str | Path) -> None:
        """Remove the plain file and the workers' files; of a link (`save_last="link"`) only the link."""
        filepath = store.plain(filepath)
        link = os.path.islink(filepath)
        if self._worker.is_global_zero:
            self._worker.checkpoint_io.remove_checkpoint(filepath)
        if self._worker.local_rank == 0 and not link:
            with suppress(FileNotFoundError):  # another node on the same file system was faster
                self._worker.checkpoint_io.remove_checkpoint(store.folder(filepath))
            store.prune(store.folder(filepath))

    def _given(self, states: dict[str, Any]) -> dict[str, Any]:
        """Return the state_dicts, the module's tensors replaced by those of the mean model, such as anchors.
        The last state_dict is the module's; one before it may be an average that a callback keeps."""
        *others, model = states
        given = self._mean_model.given(states[model], self._module.state_dict())
        return {**{key: states[key] for key in others}, model: given}

    def _means(self, states: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return the means of these models' states over the workers. Collective."""
        kept = carried(self._module)
        return {key: mean_of_states(state, self._mean_model.mean_of, kept) for key, state in states.items()}

    @property
    def _module(self) -> LightningModule:
        assert self._worker.lightning_module is not None
        return self._worker.lightning_module

    @property
    def fitting(self) -> bool:
        return bool(self._module.trainer.state.fn == TrainerFn.FITTING)

    def mid_epoch(self) -> bool:
        """Return whether batches of this epoch are still to come."""
        progress = self._module.trainer.fit_loop.epoch_loop.batch_progress
        return progress.current.ready > 0 and not progress.is_last_batch

    def _resume_random(self) -> None:
        if self._random is not None and not self._random[1]:
            worker_state.set_random_state(self._random[0])

    def _start_random(self) -> None:
        # Within an epoch not before now: Lightning has just drawn a seed to build the loader's iterator, which the
        # uninterrupted run had built before the checkpoint.
        if self._random is not None and self._random[1]:
            worker_state.set_random_state(self._random[0])
        self._random = None


# ---- forked and spawned workers that an exception ends -------------------------------------------------------------


def launched_by(strategy: Strategy, start_method: str) -> Any:
    """Return a launcher that continues the W&B runs of a checkpoint and, with forked or spawned workers, saves no
    untrained model on an exception."""
    if start_method == "popen":
        given: Any = strategy
        return ScriptLauncher(given.cluster_environment, given.num_processes, given.num_nodes)
    return WorkersLauncher(strategy, start_method=start_method)  # type: ignore[arg-type]


class ScriptLauncher(_SubprocessScriptLauncher):
    """Launches processes as Lightning does, after the loggers were given the W&B runs of the checkpoint."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        _before_processes(trainer, args)
        return super().launch(function, *args, trainer=trainer, **kwargs)


class WorkersLauncher(_MultiProcessingLauncher):
    """Runs a fit, validation or test in forked or spawned processes, where callbacks see an exception and the trained
    model. Lightning itself calls `on_exception` only in their parent process, whose model was never trained."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        _before_processes(trainer, args)
        vars(self._strategy).pop("save_checkpoint", None)
        try:
            return super().launch(partial(_run, trainer, function), *args, trainer=trainer, **kwargs)
        except BaseException:
            # On the instance, over the method of its class: the workers have saved, or couldn't.
            # This process has the model that its workers began with.
            vars(self._strategy)["save_checkpoint"] = lambda *args, **kwargs: None
            raise


def _before_processes(trainer: Any, arguments: Any) -> None:
    runs.launched(trainer, arguments)
    if trainer is not None:
        if (backend := trainer.strategy.process_group_backend) is not None:
            refuse_backend(backend, trainer.strategy.root_device)
        adapt(trainer.strategy)


def _run(trainer: Trainer | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a function in a worker's process, with callbacks' `on_exception` as in a single process."""
    try:
        with runs.finished():
            return function(*args, **kwargs)
    except _TunerExitException:
        raise
    except BaseException as error:
        if trainer is not None:
            _interrupt(trainer, error)
        raise
