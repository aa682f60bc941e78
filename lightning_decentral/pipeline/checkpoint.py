"""Checkpoints of a pipeline: one plain file, as if the unsliced model had written it.

Worker 0 merges the first pipeline's stages. The file loads without this package, and training resumes with another
number of stages or with none. Where pipelines diverge, it has their mean, and each worker's own state lies next to it.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.optimizer import _optimizer_to_device

from lightning_decentral.pipeline.wire import ownership
from lightning_decentral.pipeline.wire.ownership import Ownership
from lightning_decentral.shared.checkpoint.checkpoints import Checkpoints
from lightning_decentral.shared.checkpoint.reading import refuse_other_number, report_mean
from lightning_decentral.shared.compute import worker_state
from lightning_decentral.shared.compute.worker_state import KEY
from lightning_decentral.shared.wire.mean import MeanModel
from lightning_decentral.shared.wire.objects import collect_objects, gather_objects
from lightning_decentral.shared.wire.transport import Wire

if TYPE_CHECKING:
    import lightning_decentral.pipeline.strategy as strategy

STATES = "optimizer_states"
WHOLE = ("state_dict", STATES, KEY)
"""Entries that a pipeline merges from its stages; all other entries of a checkpoint are the same on any worker."""


class PipelineCheckpoints(Checkpoints):
    """Save and load one plain file of the whole model and, where pipelines drift, each worker's own state. `layout`:
    which stage has which parameter."""

    def __init__(
        self, worker: "strategy.TokenPipelineStrategy", mean_model: MeanModel, join_groups: Callable[[], Wire | None]
    ) -> None:
        super().__init__(worker, mean_model)
        self._join_groups = join_groups
        self.layout: Ownership | None = None  # kept after training: optimizers still keep one stage's states each
        self._stage = worker
        self._restored: dict[str, Any] | None = None
        self._own: dict[str, Any] | None = None  # this worker's own state, if its pipeline had drifted

    def save(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any) -> None:
        if self.layout is None:
            self._saving.write_alone(checkpoint, filepath, storage_options)
            return
        if self._worker.cut_off:
            self._saving.leave_out(filepath, "the stages")
            return
        self.layout.refuse_changed(together=True)
        # A checkpoint has the last stage's buffers, so this run goes on with the same ones as a resumed run.
        self.layout.share_buffers(self._stage.root_device)
        bond, diverged = self._stage.bond, self._mean_model.diverged
        keeps = (diverged or bond.keeps) and STATES in checkpoint
        path, identity = self._saving.agree(filepath, storage_options)
        mark = self._saving.mark(identity if keeps else "", path)
        of_mean = self._means({"state_dict": checkpoint["state_dict"]}) if diverged else {}
        whole = self.whole({**checkpoint, **of_mean}, mark)
        tied = {**mark, "rank": self._worker.global_rank, "bond": bond.state_dict()} if keeps else {}
        own = {**(checkpoint if diverged else {}), KEY: tied} if keeps else None
        self._saving.commit(whole, own, path, identity, storage_options)

    def whole(self, checkpoint: Mapping[str, Any], mark: dict[str, Any]) -> dict[str, Any]:
        """Merge the stages' checkpoints into the unsliced model's, on worker 0; {} on the others. Collective."""
        assert self.layout is not None
        mine: dict[str, Any] = {"random": worker_state.random_state() if STATES in checkpoint else None}
        if self._stage.pipeline == 0:  # the other entries come from the first pipeline
            states = zip(self._stage.optimizers, checkpoint.get(STATES, ()), strict=False)  # no optimizer: weights only
            # On the host: no device must have room for the whole model.
            mine["state_dict"] = {key: value.detach().cpu() for key, value in checkpoint["state_dict"].items()}
            order = self.layout.order
            mine["optimizers"] = [ownership.optimizer_part(o, state, order) for o, state in states]
        wire = self._join_groups()  # merged again, after the fit
        if STATES in checkpoint and wire is not None:
            every = gather_objects(wire.roll, [ownership.settings_of(o) for o in self._stage.optimizers])
            # Other pipelines may have other learning rates.
            ownership.check_same_groups(every[: self._stage.num_stages])
        parts = [mine] if wire is None else collect_objects(wire.roll, mine)
        if not parts:
            return {}
        stages = parts[: self._stage.num_stages]
        names = list(self.layout.order.values())
        # For tensors on several stages, the last stage's value: it runs all of the user's step.
        union = {key: value for part in stages for key, value in part["state_dict"].items()}
        keys = dict.fromkeys([*self.layout.state_keys, *union])
        joined = {**checkpoint, "state_dict": {key: union[key] for key in keys}}
        if STATES in checkpoint:
            optimizers = zip(*(part["optimizers"] for part in stages), strict=True)
            joined[STATES] = [ownership.optimizer_whole(rows, names) for rows in optimizers]
            joined[KEY] = {
                **mark,
                "stages": self._stage.num_stages,
                "plans": {length: list(slices) for length, slices in self._stage.plans.slices.items()},
                "random": [part["random"] for part in parts],
                "mid_epoch": self.mid_epoch(),
            }
        return joined

    def load(self, path: str | Path, weights_only: bool | None) -> dict[str, Any]:
        """Load the file; entries that only a pipeline of the same size can use are kept separately."""
        checkpoint = self._reading.read_together(path, weights_only)
        known = checkpoint.get(KEY, {})
        same = known.get("stages") == self._stage.num_stages and len(known.get("random", ())) == self._worker.world_size
        self._restored = known if same and self.fitting else None
        misfit = self._reading.misfit(known)
        own = self._restored is not None and known.get("id") and (self._worker.drifts or misfit is None)
        self._own = self._reading.read_own(path, known, weights_only, misfit) if own else None
        if self.fitting and not own:
            report_mean(path, checkpoint)
        # States of the whole model, which Lightning restores from; this stage's own states follow in `start`.
        return {**checkpoint, **(self._own or {}), **{key: checkpoint[key] for key in WHOLE if key in checkpoint}}

    def load_optimizers(self, checkpoint: Mapping[str, Any], layout: Ownership) -> None:
        """Load this stage's part of each optimizer's state. Collective."""
        refuse_other_number(checkpoint, self._stage.optimizers)
        order, wire = layout.order, self._stage.wire
        for optimizer, whole in zip(self._stage.optimizers, checkpoint[STATES], strict=True):
            own = [[order[p] for p in group["params"]] for group in optimizer.param_groups]
            rows = [own] if wire is None else gather_objects(wire.roll, own)
            groups = ownership.joined_names(rows, list(order.values()))
            optimizer.load_state_dict(ownership.optimizer_own(whole, groups, own))
            _optimizer_to_device(optimizer, self._stage.root_device)

    def resume(self) -> None:
        if self._restored is not None:
            self._stage.plans.slices = dict(self._restored["plans"])
            self._random = self._restored["random"][self._worker.global_rank], self._restored["mid_epoch"]
            self._resume_random()

    def start(self) -> None:
        # Only now: Lightning has restored the mean and the first pipeline's optimizer.
        own, self._own = self._own, None
        if own is not None and "state_dict" in own:  # otherwise replicas are equal
            self._module.load_state_dict(own["state_dict"])
            for optimizer, state in zip(self._stage.optimizers, own[STATES], strict=True):
                optimizer.load_state_dict(state)
                _optimizer_to_device(optimizer, self._stage.root_device)
            self._mean_model.diverged = True
        if own is not None:
            self._stage.bond.load_state_dict(own[KEY]["bond"])
        self._start_random()
        self._restored = None
