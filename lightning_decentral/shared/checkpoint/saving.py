"""Saves every worker's own file, then worker 0's plain file, then removes older files; on an error all stay."""

import os
import uuid
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

import lightning_decentral
from lightning_decentral.shared.checkpoint import store
from lightning_decentral.shared.checkpoint.store import CheckpointStore, Durable, Entrusted
from lightning_decentral.shared.compute import worker_state
from lightning_decentral.shared.compute.worker_state import KEY
from lightning_decentral.shared.wire.meeting.notices import one_line

if TYPE_CHECKING:
    import lightning_decentral.shared.fabric.strategy as fabric
    import lightning_decentral.shared.setup_and_step as trainers

CheckpointedStrategy: TypeAlias = "trainers.WorkersStrategy | fabric.FabricWorkers"
"""Strategies whose checkpoints are saved, under a Trainer or in a loop with Fabric."""


def store_of(worker: CheckpointedStrategy, path: str | Path, storage_options: Any = None) -> CheckpointStore:
    """Return a durable store for Lightning's own local files; any other CheckpointIO is used as it is."""
    io = worker.checkpoint_io
    plain = type(io) is TorchCheckpointIO and storage_options is None and _is_local_file_protocol(path)
    return Durable() if plain else Entrusted(io, storage_options)


@dataclass
class Saving:
    """Writes one worker's files of each save, and removes the files of earlier saves."""

    worker: CheckpointedStrategy
    _stale: list[str] = field(default_factory=list)  # files of earlier saves, which the present save replaces
    _before: dict[str, str] = field(default_factory=dict)  # the identity of the last save under a path

    def agree(self, filepath: str | Path, storage_options: Any = None) -> tuple[str, str]:
        """Return worker 0's (path, identity) of a save: paths may differ where values in them were not averaged."""
        asked = store.plain(filepath)
        place, orphans = store_of(self.worker, asked, storage_options), []
        if self.worker.is_global_zero:
            orphans = place.orphans(asked)
        path, identity, orphans = self.worker.broadcast((asked, uuid.uuid4().hex, orphans))
        if os.path.basename(path) == os.path.basename(asked):
            path = asked  # the folder may be this worker's own: under Ray, one that its host uploads
        else:
            warnings.warn(
                f"the checkpoint's name differs between workers, worker 0's {path} is used: "
                "log the values in the name with sync_dist=True",
                stacklevel=2,
            )
        # Listed before any worker can begin the next save, whose files are then never taken for old ones.
        files = [f for name in ("", *orphans) for f in store.listed(store.folder(path, name))]
        before = self._before.get(path)
        kept = [identity, *([before] if place.kept > 1 and before else [])]
        known = place.kept == 1 or before is not None  # a plugin's last save isn't known after a restart
        self._before[path] = identity
        old = [f for f in [*files, *place.partials(path)] if known and not any(k in f for k in kept)]
        # A node's first worker cleans up for all, and every worker after itself: its disk may be its own.
        first, own = self.worker.local_rank == 0, f"worker-{self.worker.global_rank}-of-"
        self._stale = [f for f in old if first or own in os.path.basename(f)]
        return path, identity

    def mark(self, identity: str, path: str | Path = "") -> dict[str, Any]:
        """Return a file's metadata (format, package, strategy, workers, identity), without its digest."""
        return {
            "version": worker_state.VERSION,
            "package": lightning_decentral.__version__,
            "strategy": type(self.worker).__name__,
            "plan": self.worker.plan(),
            "changeable": self.worker.changeable(),
            "optimizers": [type(optimizer).__name__ for optimizer in self.worker.optimizers],
            "rank": 0,
            "size": self.worker.world_size,
            "id": identity,
            "folder": store.name_of(path),
        }

    @staticmethod
    def leave_out(path: str | Path, whose: str) -> None:
        """Warn that no checkpoint is saved after an exception: no process has the whole model or may communicate."""
        rank_zero_warn(
            f"no checkpoint {os.fspath(path)}: after an exception {whose} can't communicate any more; resume from the "
            "last one of ModelCheckpoint(every_n_train_steps=...)"
        )

    def write_alone(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any) -> None:
        if self.worker.is_global_zero:
            asked = store.plain(path)
            place = store_of(self.worker, asked, storage_options)
            place.write(checkpoint, asked, uuid.uuid4().hex)
            place.settle(asked)

    def commit(
        self, of_all: dict[str, Any], own: dict[str, Any] | None, path: str, identity: str, storage_options: Any
    ) -> None:
        """Write every worker's own file, then worker 0's plain file; then remove the files that these replace.
        Collective. OSError: on every worker, where one of them can't write; the previous checkpoint is kept."""
        place = store_of(self.worker, path, storage_options)
        own_file = store.file(path, self.worker.global_rank, self.worker.world_size, identity)
        if own is not None:
            self._all(lambda: self._put(place, own, own_file, identity), own_file, own_file)
        first = self.worker.is_global_zero
        self._all(lambda: self._put(place, of_all, path, identity) if first else None, path, own_file)
        # Not before the new name lasts: a loss of power might bring the old one back.
        if self.worker.gather(self._tried(lambda: place.settle(path) if first else None, path))[0] is not None:
            return
        for file in self._stale:
            try:
                place.remove(file)
            except OSError as error:  # the new save is complete: no reason to end
                warnings.warn(f"worker {self.worker.global_rank} can't remove {file}: {one_line(error)}", stacklevel=2)
        for folder in {os.path.dirname(file) for file in self._stale if file.endswith(".state")}:
            store.prune(folder)
        self._stale = []

    @staticmethod
    def _put(place: CheckpointStore, content: dict[str, Any], path: str, identity: str) -> None:
        place.write(worker_state.sealed(content) if place.sealed and KEY in content else content, path, identity)
        if path.endswith(".state"):
            place.settle(path)  # before the plain file names it

    def _all(self, write: Callable[[], None], file: str, own_file: str) -> None:
        problems = [p for p in self.worker.gather(self._tried(write, file)) if p]
        if problems:
            with suppress(OSError):  # the error that stopped the writing may stop the removal, too
                store_of(self.worker, own_file).remove(own_file)  # room on a full disk
            raise OSError(f"{problems[0]}; the checkpoint before this one is kept")

    def _tried(self, write: Callable[[], None], file: str) -> str | None:
        try:
            write()
        except Exception as error:
            cause = error.__context__ if isinstance(error.__context__, OSError) else error
            reason = os.strerror(cause.errno) if isinstance(cause, OSError) and cause.errno else one_line(cause)
            return f"worker {self.worker.global_rank} can't write {file} ({reason})"
        return None
