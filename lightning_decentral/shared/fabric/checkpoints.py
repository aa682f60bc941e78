"""Checkpoints of Fabric loops: `fabric.save` and `fabric.load`, for workers that may differ.

The plain file is as any Fabric writes it, with the mean of the workers for each module, and worker 0's values of all
else. With an optimizer in the state, each worker's own state is written next to it; as many workers can resume from it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

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
    """Saves and loads one worker's state of a Fabric loop."""

    def __init__(self, worker: "fabric.FabricWorkers", mean_model: MeanModel) -> None:
        self._worker, self._mean_model = worker, mean_model  # whose mean the plain file holds
        self._saving, self._reading = Saving(worker), Reading(worker)

    def save(self, path: Any, state: Mapping[str, Any], converted: Mapping[str, Any], storage_options: Any) -> None:
        """Write the plain file (worker 0) and each worker's own file. Collective. `state`: modules, optimizers, other
        values by name; `converted`: their state_dicts."""
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
        """Context in which Fabric loads this file, read by all workers; rounds and random state follow. Collective.
        ValueError: on every worker, where one finds the file damaged."""
        checkpoint = self._reading.read_together(path, weights_only)
        mark, own = checkpoint.pop(KEY, None), None
        if mark is not None and self._worker.optimizers and _trains(state):
            own = self._reading.read_own(path, mark, weights_only, self._reading.misfit(mark))
        kept = None if own is None else own.pop(KEY)
        came = checkpoint if own is None else own
        known: Any = SimpleNamespace(load_checkpoint=lambda *_, **__: came)  # it was read already
        before, self._worker.checkpoint_io = self._worker.checkpoint_io, known
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
    """Return whether the state has an optimizer, and not weights alone."""
    return isinstance(state, Mapping) and any(isinstance(value, Optimizer) for value in state.values())
