"""Checkpoints of replicas: one plain file of the mean, and beside it what each worker needs to go on exactly."""

import os
import uuid
import warnings
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_decentral.shared.compute import worker_state
from lightning_decentral.shared.compute.worker_state import KEY
from lightning_decentral.shared.mean_model import MeanModel
from lightning_decentral.shared.wire.mean import mean_of_states
from lightning_decentral.shared.wire.transport import Wire, gather_world

_OF_MODELS = ("state_dict", "current_model_state")  # the second is where WeightAveraging moves the first


class ReplicaCheckpoints(MeanModel):
    """The part of `ReplicaStrategy` that saves and restores.

    Saving is collective (Lightning calls it on every worker) and changes no worker's trajectory. The mean's file loads
    without this package. Resuming on the same number of workers continues bit for bit on CPU; on another number all
    start from the mean.
    """

    drifts: ClassVar[bool] = True
    """Whether the replicas may differ between steps."""
    _wire: Wire | None
    _restored: dict[str, Any] | None = None

    @abstractmethod
    def rounds(self) -> list[int]:
        """Rounds taken, one number for each optimizer; none outside of training."""

    @abstractmethod
    def progress_state(self) -> dict[str, Any]:
        """Rounds and messages in flight, as tensors and primitives."""

    @abstractmethod
    def load_progress_state(self, state: dict[str, Any]) -> None:
        """Go on where `progress_state` was taken."""

    # A worker of several devices may hold its model in parts.

    @property
    def layout(self) -> str:
        """Of a worker over devices; a state fits only the layout that it was saved with."""
        return ""

    def whole(self, tree: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint as one process would have it; collective."""
        return tree

    def part(self, tree: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint of what this device holds."""
        return tree

    def restored(self, own: dict[str, Any], mean: Mapping[str, Any]) -> dict[str, Any]:
        """What is loaded into the model before set-up, where this device goes on from `own`."""
        return own

    @property
    @abstractmethod
    def alone(self) -> bool:
        """Nothing collective may be called any more."""

    # ---- save ---------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write the mean (worker 0) and, unless only weights are asked for, each worker's own state."""
        if self._wire is None or self.alone or not self.drifts:
            super().save_checkpoint(self.whole(checkpoint), filepath, storage_options)
            return
        path, identity = self._agree(filepath)
        states = {key: checkpoint[key] for key in _OF_MODELS if key in checkpoint}
        if self._swap is not None:  # an average that a callback holds is swapped, too
            states = {key: self._swap.paused(state) for key, state in states.items()}
        means = {key: mean_of_states(state, self.mean_of) for key, state in states.items()}
        full = "optimizer_states" in checkpoint and bool(self.rounds())
        mark = {"version": worker_state.VERSION, "size": self.world_size, "id": identity, "layout": self.layout}
        of_all = {**checkpoint, **means, **({KEY: mark} if full else {})}
        super().save_checkpoint(self.whole(of_all), path, storage_options)
        if full:
            own = self.part({**checkpoint, **states, KEY: {**mark, **self._own_state()}})
            self.checkpoint_io.save_checkpoint(own, worker_state.file(path, self.global_rank, self.world_size))

    def _agree(self, filepath: str | Path) -> tuple[str, str]:
        """(path, identity) of a checkpoint, worker 0's; a value in the name may differ where it wasn't averaged."""
        path, identity = self.broadcast((os.fspath(filepath), uuid.uuid4().hex))
        if path != os.fspath(filepath):
            warnings.warn(
                f"the checkpoint's name differs between workers, {path} is taken: "
                "log the values it names with sync_dist=True",
                stacklevel=2,
            )
        return path, identity

    def _own_state(self) -> dict[str, Any]:
        return {
            "progress": self.progress_state(),
            "random": worker_state.random_state(),
            "mid_epoch": self._mid_epoch(),
            "apart": self._apart,
        }

    def _mid_epoch(self) -> bool:
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        return progress.current.ready > 0 and not progress.is_last_batch

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove the mean's file and the workers'."""
        super().remove_checkpoint(filepath)
        if self.local_rank == 0:
            with suppress(FileNotFoundError):  # another node on the same file system was faster
                self.checkpoint_io.remove_checkpoint(worker_state.folder(filepath))

    # ---- load ---------------------------------------------------------------------------------------------------

    @property
    def resuming(self) -> bool:
        """Whether this worker restored its own state."""
        return self._restored is not None

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """The mean's checkpoint or, to go on training on the same number of workers, this worker's own.

        Raises:
            ValueError: the file is damaged.
        """
        self._restored = None
        checkpoint = self._read(checkpoint_path, weights_only)
        mark = checkpoint.get(KEY)
        if mark is None or not self._fitting:
            return checkpoint
        own = self._read_own(checkpoint_path, mark, weights_only)
        problems = [p for p in gather_world(own.get("problem")) if p]
        if problems:
            rank_zero_warn(f"resuming {os.fspath(checkpoint_path)}: {problems[0]}; all workers start from the mean")
            return checkpoint
        rank_zero_info(f"every worker goes on from its own state in {worker_state.folder(checkpoint_path)}")
        self._restored = own.pop(KEY)
        return self.restored(own, checkpoint)

    def _read(self, path: str | Path, weights_only: bool | None) -> dict[str, Any]:
        try:
            checkpoint: dict[str, Any] = super().load_checkpoint(path, weights_only=weights_only)
        except (FileNotFoundError, IsADirectoryError, PermissionError):
            raise
        except Exception as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            name = os.fspath(path)
            raise ValueError(f"can't read the checkpoint {name} ({reason}): it's damaged or of another kind") from error
        return checkpoint

    def _read_own(
        self, checkpoint_path: str | Path, mark: Mapping[str, Any], weights_only: bool | None
    ) -> dict[str, Any]:
        if mark["size"] != self.world_size:
            return {"problem": f"saved by {mark['size']} workers, resumed on {self.world_size}"}
        if mark.get("layout", "") != self.layout:
            return {"problem": f"saved by {mark.get('layout') or 'Solo'}, resumed with {self.layout or 'Solo'}"}
        path = worker_state.file(checkpoint_path, self.global_rank, self.world_size)
        try:
            own = self._read(path, weights_only)
        except (OSError, ValueError) as error:
            return {"problem": f"worker {self.global_rank} can't read its own state {path} ({type(error).__name__})"}
        if own[KEY]["id"] != mark["id"]:
            return {"problem": f"{path} belongs to another checkpoint"}
        return own

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Lightning's, with one line for a checkpoint of another model."""
        try:
            super().load_model_state_dict(checkpoint, strict=strict)
        except RuntimeError as error:
            first = [line.strip() for line in str(error).splitlines() if line.strip()][1:2]
            raise ValueError(
                f"the checkpoint is of another model: {first[0] if first else error} "
                "(build the model with the settings it was saved with)"
            ) from error

    def _resume(self) -> None:
        """After set-up: between epochs, the random state (see `on_train_start`)."""
        if self._restored is None:
            return
        self._apart = self._restored["apart"]
        if not self._restored["mid_epoch"]:
            worker_state.set_random_state(self._restored["random"])

    def on_train_start(self) -> None:
        """Rounds and messages in flight, once callbacks have restored which parameters are trained; and, within an
        epoch, the random state: Lightning has just drawn from it to build the iterator that the uninterrupted run had
        built before the checkpoint.
        """
        super().on_train_start()
        if self._restored is None:
            return
        self.load_progress_state(self._restored["progress"])
        if self._restored["mid_epoch"]:
            worker_state.set_random_state(self._restored["random"])
        self._restored = None

    # ---- where we are -------------------------------------------------------------------------------------------

    @property
    def _trainer(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @property
    def _fitting(self) -> bool:
        return bool(self._trainer.state.fn == TrainerFn.FITTING)
