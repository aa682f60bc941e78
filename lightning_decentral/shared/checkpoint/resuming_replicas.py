"""Checkpoints of workers with a whole model each: the mean model's file, and each worker's own state to resume from."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_decentral.shared.checkpoint.checkpoints import OF_MODELS, Checkpoints
from lightning_decentral.shared.compute import worker_state
from lightning_decentral.shared.compute.worker_state import KEY
from lightning_decentral.shared.wire.mean import MeanModel
from lightning_decentral.shared.wire.plain import NotPlain
from lightning_decentral.shared.wire.transport import connected

if TYPE_CHECKING:
    import lightning_decentral.shared.replica_strategy as replicas

LOADERS = "combined_loader"  # key of the loaders' states in Lightning's fit loop; of one worker alone


class WholeModel:
    """Tells checkpoints how to read and restore a worker's model: here one device has the whole of it."""

    layout: str = ""  # layout of a worker over devices; a state fits only the layout that it was saved with

    @property
    def spread(self) -> bool:
        """Return whether a device has only a part of the model."""
        return False

    def whole(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Return the checkpoint as a single process with the whole model would write it. Collective."""
        return tree

    def part(self, tree: dict[str, Any]) -> dict[str, Any]:
        """Return the checkpoint of the part of the model that this device holds."""
        return tree

    def restored(self, own: dict[str, Any], mean: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state to load into the model before set-up, where this device resumes from `own`."""
        return own

    def take(self, module: nn.Module, mean: Mapping[str, Any]) -> None:
        """Load the mean into the model after set-up."""
        module.load_state_dict(mean)

    def optimizers(
        self, optimizers: Sequence[Optimizer], checkpoint: Mapping[str, Any], own: bool
    ) -> Mapping[str, Any]:
        """Return the checkpoint with the optimizers' states as this device holds them; `own`: they are so already."""
        return checkpoint

    def resume(self) -> None:
        """Restore the rest of what was saved, after set-up."""


class ReplicaCheckpoints(Checkpoints):
    """Saves the mean model's file, and the state that each worker with a whole model needs to resume exactly."""

    def __init__(self, worker: "replicas.ReplicaStrategy", mean_model: MeanModel, held: WholeModel) -> None:
        super().__init__(worker, mean_model)
        self.held = held  # how this device holds its worker's model
        self._replica = worker
        self._restored: dict[str, Any] | None = None
        self._source: tuple[str | Path, bool | None] | None = None  # the checkpoint to resume from, and its reader
        self._optimizers: list[str] | None = None  # the checkpoint's optimizers

    @property
    def resuming(self) -> bool:
        """Return whether this worker restored its own state."""
        return self._restored is not None

    def save(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any) -> None:
        if self._worker.cut_off and self.held.spread:
            self._saving.leave_out(filepath, "the devices of a worker")
            return
        if self._worker.cut_off or not (connected() or self._full(checkpoint)):
            self._saving.write_alone(self.held.whole(checkpoint), filepath, storage_options)
            return
        path, identity = self._saving.agree(filepath, storage_options)
        if connected() and self._replica.keeps:
            self._save_own(checkpoint, path, identity, storage_options)
            return
        mark = {"random": self._worker.gather(worker_state.random_state()), "mid_epoch": self.mid_epoch()}
        if self._full(checkpoint):
            states = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
            try:  # progress of each worker in its data, where its loaders have a state
                mark["loaders"] = self._worker.gather(states.get(LOADERS))
            except NotPlain as error:
                rank_zero_warn(f"the checkpoint holds the state of worker 0's loaders alone: {error}")
            checkpoint = {**checkpoint, KEY: {**self._saving.mark(""), **mark}}
        self._saving.commit(checkpoint, None, path, identity, storage_options)

    def _full(self, checkpoint: Mapping[str, Any]) -> bool:
        return "optimizer_states" in checkpoint and bool(self._replica.rounds())

    def _save_own(self, checkpoint: dict[str, Any], path: str, identity: str, storage_options: Any) -> None:
        # This worker's parameters, though the mean may be swapped in; so may an average that a callback keeps.
        states = {key: self._mean_model.own(checkpoint[key]) for key in OF_MODELS if key in checkpoint}
        means = self._means(self._given(states) if self._worker.drifts else {})
        if not self._full(checkpoint):
            self._saving.commit(self.held.whole({**checkpoint, **means}), None, path, identity, storage_options)
            return
        mark = {**self._saving.mark(identity, path), "layout": self.held.layout}
        of_all = self.held.whole({**checkpoint, **means, KEY: mark})
        mine = {
            "rank": self._worker.global_rank,
            "progress": self._replica.progress_state(),
            "random": worker_state.random_state(),
            "mid_epoch": self.mid_epoch(),
            "apart": self._mean_model.diverged,
        }
        own = self.held.part({**checkpoint, **states, KEY: {**mark, **mine}})
        self._saving.commit(of_all, own, path, identity, storage_options)

    def load(self, path: str | Path, weights_only: bool | None) -> dict[str, Any]:
        self._restored, self._random, self._optimizers = None, None, None
        self._source = path, weights_only
        checkpoint = self._reading.read_together(path, weights_only)
        mark = checkpoint.get(KEY)
        if mark is None or not self.fitting:
            return checkpoint
        self._optimizers = mark.get("optimizers")
        if not mark.get("id"):
            self._take_own(mark, checkpoint)
            return checkpoint
        problem, saved, layout = self._reading.misfit(mark), mark.get("layout", ""), self.held.layout
        if problem is None and saved != layout:
            problem = f"saved by {saved or 'Solo'}, resumed with {layout or 'Solo'}"
        own = self._reading.read_own(path, mark, weights_only, problem)
        if own is None:
            return checkpoint
        self._restored = own.pop(KEY)
        return self.held.restored(own, checkpoint)

    def _take_own(self, mark: Mapping[str, Any], checkpoint: dict[str, Any]) -> None:
        """Restore own state of a worker whose model equals the others': random state, progress in its data."""
        rank = self._worker.global_rank
        if len(mark.get("random", ())) == self._worker.world_size:
            self._random = mark["random"][rank], mark["mid_epoch"]
            loaders = mark.get("loaders", {})
            if loaders and loaders[rank] is not None:
                checkpoint["loops"]["fit_loop"]["state_dict"][LOADERS] = loaders[rank]

    def fits(self, optimizers: Sequence[Optimizer]) -> bool:
        """Return whether the optimizers' states can be restored; otherwise all workers start from the mean model."""
        saved, now = self._optimizers, [type(optimizer).__name__ for optimizer in optimizers]
        if saved is None or saved == now:
            return True
        rank_zero_warn(
            f"resuming: saved with optimizer {', '.join(saved)}, this run has {', '.join(now)}; "
            "all workers start from the mean, with new optimizers"
        )
        self._random = None
        if self._restored is not None and self._source is not None:
            self._restored, self._mean_model.diverged = None, False
            self.held.take(self._module, self._reading.read(*self._source)["state_dict"])
        return False

    def resume(self) -> None:
        # Lightning takes a step of ReduceLROnPlateau after it has saved.
        configs = self._module.trainer.lr_scheduler_configs if self._source is not None and self.fitting else []
        if monitored := dict.fromkeys(str(config.monitor) for config in configs if config.reduce_on_plateau):
            rank_zero_warn(
                f"resuming: ReduceLROnPlateau looks at {', '.join(monitored)}, which no checkpoint holds. If its step "
                "was due right after the save, that step is lost, as under ddp: save within an epoch "
                "(every_n_train_steps) to resume with the learning rates of the uninterrupted run"
            )
        if self._restored is not None:
            self.held.resume()
            self._mean_model.diverged = self._restored["apart"]
            self._random = self._restored["random"], self._restored["mid_epoch"]
        self._resume_random()

    def start(self) -> None:
        if self._restored is not None:
            self._replica.load_progress_state(self._restored["progress"])
        self._start_random()
        self._restored = self._source = None
