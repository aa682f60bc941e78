"""Strategy `Trainer(strategy="token_pipeline")`: slices of one sequence follow each other through a pipeline."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_decentral.pipeline.checkpoint import PipelineCheckpoints
from lightning_decentral.pipeline.compute.deferred_init import Deferred, drawn_alike, tensors_of
from lightning_decentral.pipeline.compute.model import StagePlace
from lightning_decentral.pipeline.compute.stage import Activations, Keep
from lightning_decentral.pipeline.plan.partition import Even, Partition
from lightning_decentral.pipeline.plan.schedule import OneForwardOneBackward, Schedule, ScheduleForecast
from lightning_decentral.pipeline.plan.slicing import Slicing
from lightning_decentral.pipeline.refusals import check_depth, nothing_to_train, refuse_replaced, refuse_unserved
from lightning_decentral.pipeline.stage_gradients import StageEvaluation, StageTraining, evaluated, pipelined
from lightning_decentral.pipeline.stage_layout import StageGroups, StageLayout, introduced
from lightning_decentral.pipeline.totals import StageTotals
from lightning_decentral.pipeline.users_step import moved
from lightning_decentral.pipeline.wire.executor import Boundary, ExactActivations
from lightning_decentral.pipeline.wire.ownership import Ownership
from lightning_decentral.pipeline.wire.slice_planner import SlicePlanner
from lightning_decentral.pipeline.wire.stage_runner import StageRunner
from lightning_decentral.shared.introduction import adam_hint
from lightning_decentral.shared.plan.arguments import StrategyType, at_least, checked
from lightning_decentral.shared.plan.timeline import Span
from lightning_decentral.shared.setup_and_step import WorkersStrategy
from lightning_decentral.shared.updates import GradientCheck, NonFinite, Unfollowed
from lightning_decentral.shared.wire.agreement import check_same_model, start_from_worker_0
from lightning_decentral.shared.wire.mean import mean
from lightning_decentral.shared.wire.pipeline_replicas import AverageGradients, Bond, Replicas
from lightning_decentral.shared.wire.transport import Transport, Wire


@checked
class TokenPipelineStrategy(WorkersStrategy, metaclass=StrategyType):
    """Pipeline parallelism over the slices of each sequence; the gradients are those of the unsliced model.

        bubble = (P - 1) / (M S + P - 1)      P stages, M micro-batches, S slices of equal cost

    The LightningModule stays unchanged: its step calls one model once. Worker w is stage w % P of pipeline w // P.

    Args:
        stages: number of stages in one pipeline; by default all workers are one pipeline.
        slicing: where sequences are cut; `Planned()` measures; `Uniform(1)` for a model without a token axis.
        schedule: the order of a stage's chunks (a chunk: one slice of one micro-batch).
        partition: which blocks of the model each stage gets.
        microbatches: parts that each batch is cut into, along its first axis.
        activations: `Keep()` them, or `Recompute()` them in the backward pass.
        boundary: how hidden states and their gradients are sent; only `ExactActivations()` is exact.
        replicas: how equal stages of several pipelines train: `AverageGradients()`, or `gossip.GossipReplicas()`.
        nonfinite: what happens when gradients hold NaN or infinity: "stop" ends the training, "skip" the update.
        **ddp: options of Lightning's DDPStrategy (start_method, ...), and `timeout`.

    Raises:
        ValueError: unknown options; at set-up, workers that aren't a multiple of the stages, a model that can't be cut.

    Source: Li et al. 2102.07988 (TeraPipe); Sun et al. 2406.03488 (Seq1F1B).
    """

    checkpoints: PipelineCheckpoints
    own = ("parameters of the optimizers",)

    def __init__(
        self,
        *,
        stages: int | None = None,
        slicing: Slicing | None = None,
        schedule: Schedule | None = None,
        partition: Partition | None = None,
        microbatches: int = 1,
        activations: Activations | None = None,
        boundary: Boundary | None = None,
        replicas: Replicas | None = None,
        nonfinite: NonFinite = "stop",
        **ddp: Any,
    ) -> None:
        super().__init__(**ddp)
        at_least(1, "leave it out for all devices", stages=stages)
        at_least(1, "1 doesn't split the batch", microbatches=microbatches)
        self.stages, self.slicing, self.microbatches = stages, slicing, microbatches
        self.schedule, self.partition = schedule or OneForwardOneBackward(), partition or Even()
        self.activations, self.boundary = activations or Keep(), boundary or ExactActivations()
        self.replicas, self.bond = replicas or AverageGradients(), Bond()
        self.nonfinite, self.gradient_check = nonfinite, GradientCheck(nonfinite)
        self.plans = SlicePlanner(self.schedule, microbatches)  # from measured costs
        self.checkpoints = PipelineCheckpoints(self, self.mean_model, self._group.join_groups)
        self.evaluation = StageEvaluation(self)
        self.followed = Unfollowed(self._replaced)
        self._deferred, self._updated, self._wanted = Deferred(), 0, 0
        self._groups: StageGroups | None = None
        self._stage: StageTraining | None = None
        self._totals: StageTotals | None = None

    @property
    def layout(self) -> StageLayout:
        workers = self.num_nodes * self.num_processes
        return StageLayout(self.stages or workers, workers, self.num_processes)

    num_stages = property(attrgetter("layout.stages"))

    @property
    def pipeline(self) -> int:
        return int(self.global_rank // self.num_stages)

    @property
    def stage(self) -> int:
        return int(self.global_rank % self.num_stages)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.layout.pipelines, "rank": self.pipeline}  # a pipeline's stages read equal batches

    @property
    def drifts(self) -> bool:
        return self.replicas.drifts and self.layout.pipelines > 1

    # ---- set-up -----------------------------------------------------------------------------------------------------

    def place_on_hosts(self) -> None:
        if (layout := self.layout).pipelines > 1:
            self.replicas.check(layout.pipelines, layout.pipelines_per_node)
        check_depth(self.num_stages, self.partition, self._module)

    def refuse(self, module: nn.Module, fitting: bool) -> None:
        super().refuse(module, fitting)
        if fitting:
            refuse_unserved(self._module)

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Defer allocation in `configure_model`: tensors have no memory until their stage is known. Collective."""
        with drawn_alike(self.broadcast), torch.device("cpu"), self._deferred:
            yield

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        with self._deferred.again():  # operations on tensors without memory are recorded
            super().load_model_state_dict(checkpoint, strict=strict)

    def convert(self, module: nn.Module) -> nn.Module:
        with self._deferred.again():
            return super().convert(module)

    def place(self, fitting: bool) -> None:
        module = self._module
        if (wire := self._group.join_groups()) is not None:
            self._groups = self._groups or StageGroups(wire, self.layout, self.root_device)
            check_same_model(module, wire.roll)
            built = [t for t in (*module.parameters(), *module.buffers()) if not t.is_meta]  # meta: drawn equally
            start_from_worker_0(built, wire.flags, torch.device("cpu"))
        model = pipelined(module, self.slicing, self.root_device)
        counts = self.partition.counts(*model.loads(), self.num_stages)
        first, stage = sum(counts[: self.stage]), self.stage
        place = StagePlace(first, first + counts[stage], stage == 0, stage == self.num_stages - 1)
        over, hosts, edges = (None, None, {}) if (g := self._groups) is None else (g.over, g.hosts, g.edges)
        whole = tensors_of(module)  # before the module gives up parameters
        self.checkpoints.layout = holdings = Ownership(module, model, place, over)
        self._deferred.materialize(whole, holdings.kept)
        options: Any = {"schedule": self.schedule, "activations": self.activations, "boundary": self.boundary}
        pipe = StageRunner(model, place, over, edges, device=self.root_device, hosts=hosts, **options)
        self._stage = StageTraining(module, pipe, holdings, self.plans, slicing=self.slicing, summary=self.summary)
        self.health.look(module.buffers())
        self.model_to_device()  # only now: the device needs memory for its stage alone

    def setup_optimizers(self, trainer: Trainer) -> None:
        refuse_replaced(self._totals is not None and self.drifts)
        with nothing_to_train(self.stage, self.num_stages):
            super().setup_optimizers(trainer)

    def prepare(self, wire: Wire | None) -> None:
        assert self._stage is not None
        self._updated = self._wanted = 0
        self._totals = StageTotals(self._stage.pipe, self._stage.holdings, self._module, self.precision_plugin)
        if self._groups is not None and self.layout.pipelines > 1:
            self.bond = self._groups.bond(self.replicas)
            self.mean_model.hidden = self.bond.note
            peers = range(self.stage, self.world_size, self.num_stages)
            self.bond.prepare(self.optimizers, self._module, partial(self._group.layouts, peers=peers))
            self._stage.average = self.bond.gradients
            self.bond.guard(self.gradient_check, getattr(self.precision_plugin, "scaler", None))

    # ---- a step -----------------------------------------------------------------------------------------------------

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        return moved(self._module, batch, partial(super().batch_to_device, batch, device, dataloader_idx))

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._stage is not None
        self._wanted = self._updated + 1
        with self._group.coordination.waiting:  # a stage waits for the other stages all through the step
            return self._stage.step(self.precision_plugin, self.microbatches, self.wire, args, kwargs)

    def _replaced(self) -> None:
        self.bond.replaced(self.optimizers)

    def advance(self, optimizer: Optimizer) -> None:
        self.bond.updated(optimizer, self.lightning_module.trainer.current_epoch)  # type: ignore[union-attr]
        self._updated += 1  # only now: a worker that awaits buffers awaits this update's

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluated(self.precision_plugin.val_step_context(), self._module.validation_step, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluated(self.precision_plugin.test_step_context(), self._module.test_step, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluated(self.precision_plugin.predict_step_context(), self._module.predict_step, args, kwargs)

    def _evaluated(self, precision: Any, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        assert self._stage is not None
        with precision:
            return evaluated(self._stage.pipe, self.plans, lambda: step(*args, **kwargs))

    def plan(self) -> dict[str, str]:
        return {"replicas": repr(self.replicas)}

    def rounds(self) -> list[int]:
        return [self._updated]

    def wanted(self) -> list[int]:
        return [self._wanted]

    # ---- the mean of the pipelines, checkpoints, the end ------------------------------------------------------------

    def mean_of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        over = self.replica_group()  # other stages have other tensors
        assert over is not None
        return mean(tensors, over, self.bond.share())

    def replica_group(self) -> Transport | None:
        return None if self._groups is None else self._groups.replicas

    def settle(self) -> None:
        self.bond.settle()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self.checkpoints.layout is None:
            super().load_optimizer_state_dict(checkpoint)
        else:
            self.checkpoints.load_optimizers(checkpoint, self.checkpoints.layout)

    def release(self) -> None:
        """Make the module whole again on every worker, unless an exception has cut this worker off."""
        if self._totals is not None:
            self._totals.close()
        self.bond.release()
        self.bond, self.mean_model.diverged = Bond(), False
        if self._stage is not None and not self.cut_off:
            self._module.zero_grad()
            self._stage.holdings.give_back(self.root_device)
        self._stage, self._totals, self._groups = None, None, None

    @property
    def step_seconds(self) -> float:
        """Seconds of the latest step's forward and backward on this stage, including waits."""
        return 0.0 if self._stage is None else self._stage.seconds

    def total(self, number: Tensor) -> Tensor:
        """Sum a number over the stages of this pipeline, during a fit. Collective."""
        assert self._stage is not None, "stages sum between set-up and teardown"
        return self._stage.pipe.total(number.detach().to(self.root_device, copy=True))

    def introduction(self) -> Sequence[str]:
        if self.world_size == 1:
            return ()
        line = introduced(self.layout, self.microbatches, self.replicas, self._module, self.drifts)
        return [line, *([adam_hint(self.optimizers, self.layout.pipelines)] if self.drifts else [])]

    def summary(self) -> dict[str, str]:
        by = f", replicas by {self.replicas!r}" if self.layout.pipelines > 1 else ""
        return {"pipelines": f"{self.layout.pipelines} of {self.num_stages} stages{by}", **self.plans.summary()}

    def measured(self) -> dict[str, Span]:
        """Return each action's span in the latest step, on all stages, by their hosts' clocks. Collective."""
        assert self._stage is not None
        return {str(a): span for row in self._stage.pipe.gather(self._stage.spans) for a, span in row.items()}

    def expected(self) -> ScheduleForecast | None:
        """Forecast a step with the latest plan; None before the first step or without measurements."""
        return self.plans.expected()
