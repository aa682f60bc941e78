"""Checkpoints of loops with Fabric: `fabric.save` and `fabric.load`, for workers that may differ.

The plain file is what any Fabric writes, with the mean of the workers for each module; worker 0's state of everything
else. Where the state has an optimizer, each worker's own is written next to it, and read again by as many workers.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning.fabric.plugins import CheckpointIO
from torch import nn
from torch.optim import Optimizer

from lightning_decentral.shared.checkpoint.reading import Reading
from lightning_decentral.shared.checkpoint.saving import Saving
from lightning_decentral.shared.compute import worker_state
from lightning_decentral.shared.compute.carried import carried
from lightning_decentral.shared.compute.worker_state import KEY
from lightning_decentral.shared.wire.mean import MeanModel, mean_of_states

if TYPE_CHECKING:
    import lightning_decentral.shared.fabric.strategy as fabric


class FabricCheckpoints:
    """One worker's saves and reads of a loop's state."""

    def __init__(self, worker: "fabric.FabricWorkers", mean_model: MeanModel) -> None:
        self._worker, self._mean_model = worker, mean_model  # the plain file holds this one's where workers diverge
        self._saving, self._reading = Saving(worker), Reading(worker)

    def save(self, path: Any, state: Mapping[str, Any], converted: Mapping[str, Any], storage_options: Any) -> None:
        """Write the plain file (worker 0) and each worker's own. Collective. `state` are modules, optimizers and other
        values, by name, `converted` the same as state_dicts."""
        path, identity = self._saving.agree(path, storage_options)
        modules = [key for key, value in state.items() if isinstance(value, nn.Module)]
        own = {**converted, **{key: self._mean_model.own(converted[key]) for key in modules}}
        diverging = modules if self._worker.drifts else []
        mean_of = self._mean_model.mean_of
        of_all = {**own, **{key: mean_of_states(own[key], mean_of, carried(state[key])) for key in diverging}}
        if not (self._worker.keeps and _trains(state)):
            self._saving.commit(of_all, None, path, identity, storage_options)
            return
        mark = self._saving.mark(identity, path)
        mine = {
            "rank": self._worker.global_rank,
            "progress": self._worker.progress_state(),
            "random": worker_state.random_state(),
            "apart": self._mean_model.diverged,
        }
        own[KEY], of_all[KEY] = {**mark, **mine}, mark
        self._saving.commit(of_all, own, path, identity, storage_options)

    @contextmanager
    def reading(self, path: Any, state: Any, weights_only: bool | None) -> Iterator[None]:
        """Load this file's contents within, read by all workers; afterwards the rest of the state goes on. Collective.
        ValueError: on every worker, where one finds the file damaged."""
        checkpoint = self._reading.read_together(path, weights_only)
        mark, own = checkpoint.pop(KEY, None), None
        if mark is not None and self._worker.optimizers and _trains(state):
            own = self._reading.read_own(path, mark, weights_only, self._reading.misfit(mark))
        kept = None if own is None else own.pop(KEY)
        before, self._worker.checkpoint_io = self._worker.checkpoint_io, _Read(checkpoint if own is None else own)
        try:
            yield
        finally:
            self._worker.checkpoint_io = before
        if state and kept is None:
            self._mean_model.diverged = False
            self._worker.restart()
        elif state and kept is not None:
            self._mean_model.diverged = kept["apart"]
            self._worker.load_progress_state(kept["progress"])
            worker_state.set_random_state(kept["random"])


def _trains(state: Any) -> bool:
    """Return whether more than weights is saved or restored: an optimizer, too."""
    return isinstance(state, Mapping) and any(isinstance(value, Optimizer) for value in state.values())


class _Read(CheckpointIO):
    """Checkpoint IO that returns what was read already."""

    def __init__(self, checkpoint: dict[str, Any]) -> None:
        self._checkpoint = checkpoint

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        return self._checkpoint

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        raise AssertionError("only read from")

    def remove_checkpoint(self, path: Any) -> None:
        raise AssertionError("only read from")
