"""Checkpoints of a pipeline: one plain file, as the unsliced model would have written it.

The parts of the first pipeline's stages are put together on worker 0's host, never on a device. So the file loads
without this package, and training goes on with another number of stages or with none.

Where pipelines drift apart the file is their mean's, and each worker's own state lies beside it, in
`NAME.ckpt.workers/`.
"""

import os
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.optimizer import _optimizer_to_device
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_decentral.pipeline.wire.ownership import (
    Holdings,
    joined_names,
    optimizer_own,
    optimizer_part,
    optimizer_whole,
)
from lightning_decentral.pipeline.wire.slice_planner import Plans
from lightning_decentral.pipeline.workers import Pipelines
from lightning_decentral.shared.compute import worker_state
from lightning_decentral.shared.compute.worker_state import KEY
from lightning_decentral.shared.wire.mean import mean_of_states
from lightning_decentral.shared.wire.transport import collect_objects, gather_objects, gather_world

STATES = "optimizer_states"
WHOLE = ("state_dict", STATES, KEY)
"""What a pipeline puts together from its stages; the rest of a checkpoint is any worker's."""


class PipelineCheckpoints(Pipelines):
    """The part of `TokenPipelineStrategy` that saves and restores."""

    _layout: Holdings | None = None
    """Who has what; kept after the end of training, when optimizers still hold one stage's states each."""
    plans: Plans
    _restored: dict[str, Any] | None = None
    _own: dict[str, Any] | None = None
    """What this worker had where its pipeline had drifted."""

    # ---- save ---------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write the whole, on worker 0. Collective."""
        if self._layout is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if self.alone:
            rank_zero_warn(f"no checkpoint {os.fspath(filepath)}: after an exception the stages can't meet any more")
            return
        apart = self._apart and STATES in checkpoint
        path, identity = self.broadcast((os.fspath(filepath), uuid.uuid4().hex if apart else ""))
        mine = self._part(self._of_mean(checkpoint))
        parts = [mine] if self._wire is None else collect_objects(self._wire.roll, mine)
        if self.is_global_zero:
            super().save_checkpoint(self._joined(checkpoint, parts, identity), path, storage_options)
        if apart:
            own = {**checkpoint, KEY: {"id": identity, "bond": self._bond.state_dict()}}
            self.checkpoint_io.save_checkpoint(own, worker_state.file(path, self.global_rank, self.world_size))

    def _of_mean(self, checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
        if not self._apart:
            return checkpoint
        return {**checkpoint, "state_dict": mean_of_states(checkpoint["state_dict"], self.mean_of)}

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove the file and the workers'."""
        super().remove_checkpoint(filepath)
        if self._drifting and self.local_rank == 0:
            with suppress(FileNotFoundError):  # another node on the same file system was faster
                self.checkpoint_io.remove_checkpoint(worker_state.folder(filepath))

    def _part(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        assert self._layout is not None
        random = worker_state.random_state() if STATES in checkpoint else None
        if self.pipeline > 0:
            return {"random": random}
        states = zip(self.optimizers, checkpoint.get(STATES, ()), strict=False)
        return {
            "state_dict": {key: value.detach().cpu() for key, value in checkpoint["state_dict"].items()},
            "optimizers": [optimizer_part(o, state, self._layout.order) for o, state in states],
            "random": random,
        }

    def _joined(self, checkpoint: Mapping[str, Any], parts: list[dict[str, Any]], identity: str) -> dict[str, Any]:
        assert self._layout is not None
        stages = parts[: self.num_stages]
        order = list(self._layout.order.values())
        union = {key: value for part in reversed(stages) for key, value in part["state_dict"].items()}
        joined = {**checkpoint, "state_dict": {key: union[key] for key in self._layout.state_keys}}
        if STATES in checkpoint:
            states = zip(*(part["optimizers"] for part in stages), strict=True)
            joined[STATES] = [optimizer_whole(rows, order) for rows in states]
            joined[KEY] = {
                "version": worker_state.VERSION,
                "stages": self.num_stages,
                "id": identity,
                "plans": {length: list(slices) for length, slices in self.plans.slices.items()},
                "random": [part["random"] for part in parts],
                "mid_epoch": self._mid_epoch(),
            }
        return joined

    def _mid_epoch(self) -> bool:
        assert self.lightning_module is not None
        progress = self.lightning_module.trainer.fit_loop.epoch_loop.batch_progress
        return progress.current.ready > 0 and not progress.is_last_batch

    # ---- load ---------------------------------------------------------------------------------------------------

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """The file, and aside what only a pipeline of the same size can use."""
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        own = checkpoint.get(KEY, {})
        same = own.get("stages") == self.num_stages and len(own.get("random", ())) == self.world_size
        self._restored = own if same else None
        drifted = same and own.get("id") and self._drifting and self.lightning_module is not None
        self._own = self._read_own(checkpoint_path, own["id"], weights_only) if drifted else None
        return {**checkpoint, **(self._own or {}), **{key: checkpoint[key] for key in WHOLE if key in checkpoint}}

    def _read_own(self, path: str | Path, identity: str, weights_only: bool | None) -> dict[str, Any] | None:
        """This worker's own state, if every worker has its; otherwise all start from the mean. Collective."""
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.fn != TrainerFn.FITTING:
            return None
        file, own = worker_state.file(path, self.global_rank, self.world_size), None
        with suppress(OSError):
            own = self.checkpoint_io.load_checkpoint(file, map_location="cpu", weights_only=weights_only)
        if all(gather_world(own is not None and own[KEY]["id"] == identity)):
            return own
        rank_zero_warn(f"some state in {worker_state.folder(path)} is missing or of another checkpoint: from the mean")
        return None

    def _go_on_apart(self) -> None:
        """Each worker from where it was, once Lightning has restored the mean and the first pipeline's optimizer."""
        if self._own is None:
            return
        own, self._own = self._own, None
        self._module.load_state_dict(own["state_dict"])
        for optimizer, state in zip(self.optimizers, own[STATES], strict=True):
            optimizer.load_state_dict(state)
            _optimizer_to_device(optimizer, self.root_device)
        self._bond.load_state_dict(own[KEY]["bond"])
        self._apart = True

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """This stage's part of each optimizer's state. Collective."""
        if self._layout is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        order = self._layout.order
        for optimizer, whole in zip(self.optimizers, checkpoint[STATES], strict=True):
            own = [[order[p] for p in group["params"]] for group in optimizer.param_groups]
            rows = [own] if self._wire is None else gather_objects(self._wire.roll, own)
            groups = joined_names(rows, list(order.values()))
            optimizer.load_state_dict(optimizer_own(whole, groups, own))
            _optimizer_to_device(optimizer, self.root_device)

    def _resume(self) -> None:
        """After set-up: the plans, and between epochs the random state."""
        if self._restored is None:
            return
        self.plans.slices = dict(self._restored["plans"])
        if not self._restored["mid_epoch"]:
            worker_state.set_random_state(self._restored["random"][self.global_rank])

    def on_train_start(self) -> None:
        """Within an epoch, the random state: Lightning has just drawn from it to build the iterator that the
        uninterrupted run had built before the checkpoint."""
        super().on_train_start()
        self._go_on_apart()
        if self._restored is not None and self._restored["mid_epoch"]:
            worker_state.set_random_state(self._restored["random"][self.global_rank])
        self._restored = None
