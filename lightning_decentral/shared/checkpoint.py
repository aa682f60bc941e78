"""Saving and resuming several workers: the mean model in one plain file, each worker's own state beside it.

The plain file loads without this package.

Saving is collective (Lightning calls it on every worker) and changes no worker's trajectory. Resuming on the same
number of workers continues bit for bit on CPU; on another number all start from the mean.
"""

import os
import uuid
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_decentral.shared.compute import worker_state
from lightning_decentral.shared.compute.worker_state import KEY
from lightning_decentral.shared.wire.mean import MeanModel, mean_of_states
from lightning_decentral.shared.wire.objects import gather_world
from lightning_decentral.shared.wire.transport import connected

_OF_MODELS = ("state_dict", "current_model_state")  # the second is where WeightAveraging moves the first


class Worker(Protocol):
    """What checkpoints ask of the strategy that they are of; Lightning's own, and whether its workers may meet."""

    @property
    def global_rank(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def is_global_zero(self) -> bool: ...
    @property
    def checkpoint_io(self) -> CheckpointIO: ...
    @property
    def lightning_module(self) -> LightningModule | None: ...
    @property
    def alone(self) -> bool: ...
    @property
    def drifts(self) -> bool: ...
    def broadcast(self, obj: Any, src: int = 0) -> Any: ...


class Progress(Protocol):
    """What a method adds to a worker's own state."""

    def rounds(self) -> list[int]:
        """Rounds taken, one number for each optimizer; none outside of training."""

    def progress_state(self) -> dict[str, Any]:
        """Rounds and messages in flight, as tensors and primitives."""

    def load_progress_state(self, state: dict[str, Any]) -> None:
        """Go on where `progress_state` was taken."""


class Checkpoints(ABC):
    """Saving and resuming of one worker: what all methods have in common.

    Args:
        worker: whose they are.
        mean_model: what the plain file holds where workers drift apart.
    """

    def __init__(self, worker: Worker, mean_model: MeanModel) -> None:
        self._worker, self._mean_model = worker, mean_model
        self._random: tuple[dict[str, Any], bool] | None = None  # restored, and whether within an epoch

    @abstractmethod
    def save(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any) -> None:
        """Write the plain file (worker 0) and, where workers drift and more than weights is asked for, each worker's
        own. Collective."""

    @abstractmethod
    def load(self, path: str | Path, weights_only: bool | None) -> dict[str, Any]:
        """What Lightning restores from; the rest is kept for `resume` and `start`. Collective.

        Raises:
            ValueError: the file is damaged.
        """

    @abstractmethod
    def resume(self) -> None:
        """After set-up."""

    @abstractmethod
    def start(self) -> None:
        """When training starts, once callbacks have restored which parameters are trained."""

    def remove(self, filepath: str | Path) -> None:
        """Remove the plain file and the workers'."""
        if self._worker.is_global_zero:
            self._worker.checkpoint_io.remove_checkpoint(filepath)
        if self._worker.local_rank == 0:
            with suppress(FileNotFoundError):  # another node on the same file system was faster
                self._worker.checkpoint_io.remove_checkpoint(worker_state.folder(filepath))

    # ---- where we are -----------------------------------------------------------------------------------------------

    @property
    def _module(self) -> LightningModule:
        assert self._worker.lightning_module is not None
        return self._worker.lightning_module

    @property
    def fitting(self) -> bool:
        return bool(self._module.trainer.state.fn == TrainerFn.FITTING)

    def mid_epoch(self) -> bool:
        """Whether batches of this epoch are still to come."""
        progress = self._module.trainer.fit_loop.epoch_loop.batch_progress
        return progress.current.ready > 0 and not progress.is_last_batch

    # ---- files ------------------------------------------------------------------------------------------------------

    def _agree(self, filepath: str | Path) -> tuple[str, str]:
        """(path, identity) of a checkpoint, worker 0's; a value in the name may differ where it wasn't averaged."""
        path, identity = self._worker.broadcast((os.fspath(filepath), uuid.uuid4().hex))
        if path != os.fspath(filepath):
            warnings.warn(
                f"the checkpoint's name differs between workers, {path} is taken: "
                "log the values it names with sync_dist=True",
                stacklevel=2,
            )
        return path, identity

    def _write(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any) -> None:
        if self._worker.is_global_zero:
            self._worker.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)

    def _write_own(self, own: dict[str, Any], path: str | Path) -> None:
        self._worker.checkpoint_io.save_checkpoint(own, self._own_file(path))

    def _own_file(self, path: str | Path) -> str:
        return worker_state.file(path, self._worker.global_rank, self._worker.world_size)

    def _read(self, path: str | Path, weights_only: bool | None) -> dict[str, Any]:
        torch.cuda.empty_cache()  # as Lightning does: what is loaded may need the room
        try:
            checkpoint: dict[str, Any] = self._worker.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
        except (FileNotFoundError, IsADirectoryError, PermissionError):
            raise  # these name the file, and it isn't damaged
        except Exception as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            name = os.fspath(path)
            raise ValueError(f"can't read the checkpoint {name} ({reason}): it's damaged or of another kind") from error
        return checkpoint

    def _read_own(
        self, path: str | Path, identity: str, weights_only: bool | None, problem: str | None = None
    ) -> dict[str, Any] | None:
        """This worker's own state, if every worker can go on from its; otherwise all start from the mean. Collective.

        Args:
            problem: already known to this worker.
        """
        file, own = self._own_file(path), None
        if problem is None:
            try:
                own = self._read(file, weights_only)
            except (OSError, ValueError) as error:
                kind = type(error).__name__
                problem = f"worker {self._worker.global_rank} can't read its own state {file} ({kind})"
        if own is not None and own[KEY]["id"] != identity:
            problem = f"{file} belongs to another checkpoint"
        # All or none: own states and the mean don't mix.
        problems = [p for p in gather_world(problem) if p]
        if problems:
            rank_zero_warn(f"resuming {os.fspath(path)}: {problems[0]}; all workers start from the mean")
            return None
        rank_zero_info(f"every worker goes on from its own state in {worker_state.folder(path)}")
        return own

    # ---- random numbers ---------------------------------------------------------------------------------------------

    def _resume_random(self) -> None:
        if self._random is not None and not self._random[1]:
            worker_state.set_random_state(self._random[0])

    def _start_random(self) -> None:
        # Within an epoch only now: Lightning has just drawn from it to build the iterator, which the uninterrupted run
        # had built before the checkpoint.
        if self._random is not None and self._random[1]:
            worker_state.set_random_state(self._random[0])
        self._random = None


class WholeModel:
    """How a device holds its worker's model: here as a whole."""

    layout: str = ""
    """Of a worker over devices; a state fits only the layout that it was saved with."""

    def whole(self, tree: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint as one process would have it; collective."""
        return tree

    def part(self, tree: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint of what this device holds."""
        return tree

    def restored(self, own: dict[str, Any], mean: Mapping[str, Any]) -> dict[str, Any]:
        """What is loaded into the model before set-up, where this device goes on from `own`."""
        return own

    def resume(self) -> None:
        """After set-up: the rest of what was restored."""


class ReplicaCheckpoints(Checkpoints):
    """Of workers with a whole model each: the mean's file, and what each worker needs to go on exactly.

    Args:
        progress: the method's own.
        held: how this device holds its worker's model.
    """

    def __init__(self, worker: Worker, mean_model: MeanModel, progress: Progress, held: WholeModel) -> None:
        super().__init__(worker, mean_model)
        self.held = held
        self._progress = progress
        self._restored: dict[str, Any] | None = None

    @property
    def resuming(self) -> bool:
        """Whether this worker restored its own state."""
        return self._restored is not None

    def save(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any) -> None:
        if not connected() or self._worker.alone or not self._worker.drifts:
            self._write(self.held.whole(checkpoint), filepath, storage_options)
            return
        path, identity = self._agree(filepath)
        # Own values, though the mean may stand in their place; an average that a callback holds is swapped, too.
        states = {key: self._mean_model.own(checkpoint[key]) for key in _OF_MODELS if key in checkpoint}
        means = {key: mean_of_states(state, self._mean_model.mean_of) for key, state in states.items()}
        full = "optimizer_states" in checkpoint and bool(self._progress.rounds())
        size, layout = self._worker.world_size, self.held.layout
        mark = {"version": worker_state.VERSION, "size": size, "id": identity, "layout": layout}
        of_all = {**checkpoint, **means, **({KEY: mark} if full else {})}
        self._write(self.held.whole(of_all), path, storage_options)
        if full:
            self._write_own(self.held.part({**checkpoint, **states, KEY: {**mark, **self._own_state()}}), path)

    def _own_state(self) -> dict[str, Any]:
        return {
            "progress": self._progress.progress_state(),
            "random": worker_state.random_state(),
            "mid_epoch": self.mid_epoch(),
            "apart": self._mean_model.apart,
        }

    def load(self, path: str | Path, weights_only: bool | None) -> dict[str, Any]:
        self._restored = None
        checkpoint = self._read(path, weights_only)
        mark = checkpoint.get(KEY)
        if mark is None or not self.fitting:
            return checkpoint
        own = self._read_own(path, mark["id"], weights_only, self._misfit(mark))
        if own is None:
            return checkpoint
        self._restored = own.pop(KEY)
        return self.held.restored(own, checkpoint)

    def _misfit(self, mark: Mapping[str, Any]) -> str | None:
        """Why no worker can go on from its own state."""
        size, layout = self._worker.world_size, self.held.layout
        if mark["size"] != size:
            return f"saved by {mark['size']} workers, resumed on {size}"
        if mark.get("layout", "") != layout:
            return f"saved by {mark.get('layout') or 'Solo'}, resumed with {layout or 'Solo'}"
        return None

    def resume(self) -> None:
        if self._restored is not None:
            self.held.resume()
            self._mean_model.apart = self._restored["apart"]
            self._random = self._restored["random"], self._restored["mid_epoch"]
            self._resume_random()

    def start(self) -> None:
        if self._restored is not None:
            self._progress.load_progress_state(self._restored["progress"])
            self._start_random()
            self._restored = None
