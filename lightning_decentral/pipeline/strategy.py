"""`Trainer(strategy="token_pipeline")`: slices of one sequence follow each other through a pipeline."""

import time
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_decentral.optim.quasi_global import QuasiGlobalAdam
from lightning_decentral.pipeline.checkpoint import PipelineCheckpoints
from lightning_decentral.pipeline.compute.activation_codec import Boundary, ExactActivations
from lightning_decentral.pipeline.compute.adapters import find
from lightning_decentral.pipeline.compute.loss import deliver
from lightning_decentral.pipeline.compute.model import Call, Pipelined, StagePlace
from lightning_decentral.pipeline.compute.stage import Activations, Keep
from lightning_decentral.pipeline.plan.partition import Even, Partition
from lightning_decentral.pipeline.plan.schedule import Action, OneForwardOneBackward, Schedule, ScheduleForecast
from lightning_decentral.pipeline.plan.slicing import Planned, Slicing, Uniform
from lightning_decentral.pipeline.training_step import Logs, TrainingStep
from lightning_decentral.pipeline.wire.cost_cache import CostCache
from lightning_decentral.pipeline.wire.ownership import Holdings
from lightning_decentral.pipeline.wire.slice_planner import Plans
from lightning_decentral.pipeline.wire.stage_runner import Pipe
from lightning_decentral.pipeline.workers import PipelineBuilding, PipelineEvaluation, tensors_of
from lightning_decentral.shared import registration as names
from lightning_decentral.shared.plan.timeline import Span
from lightning_decentral.shared.registration import refuse_sync_batch_norm, refuse_unknown
from lightning_decentral.shared.wire.replicas import Replicas
from lightning_decentral.shared.wire.transport import gather_objects


@runtime_checkable
class Staged(Protocol):
    """A LightningModule that says itself what is cut into stages."""

    def pipeline_stages(self) -> Pipelined:
        """Usually a `Chain`."""


class TokenPipelineStrategy(PipelineEvaluation, PipelineCheckpoints, PipelineBuilding):
    """Slices of one sequence follow each other through the stages; gradients are those of the unsliced model.

        bubble = (P - 1) / (M S + P - 1)      P stages, M micro-batches, S slices of equal cost

    The LightningModule stays as it is: its `training_step` calls one causal model of `transformers` (GPT-2, Llama,
    Qwen2, Mistral) once and returns a loss. Worker w is stage w % P of pipeline w // P.

    Args:
        stages: of one pipeline; by default all workers are one pipeline.
        slicing: where sequences are cut; `Planned()` measures, or `Uniform(1)` for a model without a token axis.
        schedule: the order of chunks.
        partition: which blocks stand on which stage.
        microbatches: parts that each batch is cut into, along its first axis.
        cost_cache: folder that keeps measured stage costs for later runs; by default every run measures its own.
        activations: `Keep()` them, or `Recompute()` them at the backward.
        boundary: of hidden states and their gradients on the wire; anything but `ExactActivations()` isn't exact.
        replicas: what equal stages of several pipelines do together: `AverageGradients()`, or
            `gossip.GossipReplicas()` of parameters.
        **ddp: what Lightning's DDPStrategy itself takes (start_method, process_group_backend, timeout, ...).

    Raises:
        ValueError: here for unknown options and numbers below 1; at set-up where the number of workers isn't a multiple
            of the stages, there are more stages than blocks, or the model can't be cut.

    Source: Li et al. 2102.07988 (TeraPipe); Sun et al. 2406.03488 (Seq1F1B).
    """

    def __init__(
        self,
        *,
        stages: int | None = None,
        slicing: Slicing | None = None,
        schedule: Schedule | None = None,
        partition: Partition | None = None,
        microbatches: int = 1,
        cost_cache: str | None = None,
        activations: Activations | None = None,
        boundary: Boundary | None = None,
        replicas: Replicas | None = None,
        **ddp: Any,
    ) -> None:
        refuse_unknown(type(self), ddp)
        super().__init__(stages=stages, replicas=replicas, **ddp)
        if microbatches < 1:
            raise ValueError(f"microbatches must be at least 1, got {microbatches}")
        self.slicing = slicing
        self.schedule = schedule or OneForwardOneBackward()
        self.partition = partition or Even()
        self.microbatches = microbatches
        self.cost_cache = cost_cache
        self.activations = activations or Keep()
        self.boundary = boundary or ExactActivations()
        self._holdings: Holdings | None = None
        self._logs: Logs | None = None
        self._spans: dict[Action, Span] = {}
        self.step_seconds = 0.0
        """Of the latest step's forward and backward on this stage, its waits included."""
        self.plans = Plans(self.schedule, microbatches, CostCache(cost_cache))
        """Slices of each length that came, and the measurements they rest on."""

    # ---- set-up -------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Equal models everywhere, then each stage's own part; only that is moved to the device and optimized."""
        assert self.accelerator is not None
        assert self.model is not None
        module = self._module
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        refuse_sync_batch_norm(type(self), self.model, asked=self._layer_sync is not None)
        if fitting and not module.automatic_optimization:
            raise ValueError("a token pipeline runs the backward itself: set automatic_optimization = True")
        self.model = self._convert(self.model)
        self._connect(module)
        self._take_part(module)
        self.model_to_device()
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)
            self.precision_plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]
            for optimizer in self._measuring():
                optimizer.norm = self._norm  # type: ignore[method-assign]
            self._join()
            self._resume()

    def _measuring(self) -> list[QuasiGlobalAdam]:
        """Optimizers that want a norm over the whole model."""
        return [optimizer for optimizer in self.optimizers if isinstance(optimizer, QuasiGlobalAdam)]

    def _take_part(self, module: LightningModule) -> None:
        model = module.pipeline_stages() if isinstance(module, Staged) else find(module)
        self._refuse_slices(model)
        counts = self.partition.counts(*model.loads(), self.num_stages)
        stop = sum(counts[: self.stage + 1])
        first, last = self.stage == 0, self.stage == self.num_stages - 1
        place = StagePlace(stop - counts[self.stage], stop, first, last)
        over = self._over if self.num_stages > 1 else None
        whole = tensors_of(module)
        self._layout = self._holdings = Holdings(module, model, place, over)
        self._materialize(whole, self._holdings.kept)
        self._pipe = Pipe(
            model,
            place,
            over,
            self._back,
            schedule=self.schedule,
            activations=self.activations,
            boundary=self.boundary,
            device=self.root_device,
        )
        self._logs = Logs(module)
        mine = f"{counts[self.stage]} blocks, {sum(p.numel() for p in self._holdings.kept):,} parameters"
        self.plans.stages = [mine] if over is None else gather_objects(over, mine)

    def _refuse_slices(self, model: Pipelined) -> None:
        if not model.sliceable and self.slicing not in (None, Uniform(1)):
            raise ValueError(
                f"{type(model.module).__name__} needs all of an input at once (attention in both directions, or no "
                f"tokens at all), so it can't be cut into slices: leave slicing={self.slicing} out and use microbatches"
            )

    # ---- training -----------------------------------------------------------------------------------------------

    def _slices(self, calls: Sequence[Call]) -> list[int]:
        """Of this length and size of micro-batch; planned where it's the first of its kind. Collective."""
        assert self._pipe is not None
        model = self._pipe.model
        slicing = self.slicing or (Planned() if model.sliceable else Uniform(1))
        if slicing.measures:
            self.plans.measure(calls[0], self._pipe, None if self._wire is None else self._wire.roll)
        known = self.plans.known(calls[0], model.length(calls[0]))
        if known is not None:
            return known
        slices = self.plans.make(slicing, calls[0], self._pipe)
        rank_zero_info("\n".join(f"{name}: {value}" for name, value in self.summary().items()))
        return slices

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """The whole of forward and backward; what it returns hands the gradients to Lightning's own backward."""
        assert self._pipe is not None
        assert self._holdings is not None
        assert self._logs is not None
        scaler = self.precision_plugin.scaler if isinstance(self.precision_plugin, MixedPrecision) else None
        scale = 1.0 if scaler is None else float(scaler.get_scale())
        step = TrainingStep(self._pipe, self._module, self._logs, self.microbatches, scale)
        trained = [p for p in self._holdings.order if p in self._holdings.kept and p.requires_grad]
        before = [p.grad for p in trained]  # of batches whose gradients are accumulated
        self._set(trained, [None] * len(trained))
        with self.precision_plugin.train_step_context():
            step.read(*args, **kwargs)
            slices = self.plans.within_memory(self.stage, lambda: self._slices(step.calls))
            self._set(trained, [None] * len(trained))  # a measurement's
            begin = time.perf_counter()
            self.plans.within_memory(self.stage, lambda: step.run(slices))
            self.step_seconds = time.perf_counter() - begin
        self._spans = step.spans
        gradients = [p.grad for p in trained]
        outcome = step.conclude(_finite(gradients), self.root_device)
        for gradient in gradients:
            if gradient is not None:
                gradient.mul_(outcome.factor / scale)
                if scaler is not None and not outcome.finite:  # every stage's scaler must skip the step and back off
                    gradient.fill_(float("inf"))
        self._set(trained, self._bond.gradients(gradients, trained))
        # Last: replicas of another stage add up in another order, a sum of two means is the same at both holders.
        self._pipe.tie(self._holdings.tied, self._holdings.outside)
        gradients = [p.grad for p in trained]
        self._set(trained, before)
        exact = torch.float64 if any(p.dtype == torch.float64 for p in trained) else torch.float32
        value = torch.tensor(outcome.loss, dtype=exact, device=self.root_device)
        return deliver(value, gradients, trained)

    def _set(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Scale by min(1, clip_val / (norm + 1e-6)), the norm being that of all stages' gradients, tied ones once."""
        parameters = [p for p in self.precision_plugin.main_params(optimizer) if p.grad is not None]
        norm = self._norm(parameters, [p.grad for p in parameters if p.grad is not None])
        factor = (clip_val / (norm + 1e-6)).clamp(max=1.0)
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(factor.to(parameter.grad.dtype))

    def _norm(self, parameters: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor:
        """Of a tensor for each of these parameters, over all stages, tied ones once. Collective."""
        assert self._pipe is not None
        assert self._holdings is not None
        counted = set(self._holdings.counted)
        pairs = zip(parameters, tensors, strict=True)
        squares = [t.detach().double().square().sum() for p, t in pairs if p in counted]
        return self._pipe.total(sum(squares, torch.zeros((), dtype=torch.float64, device=self.root_device))).sqrt()

    # ---- the end ------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Make the module whole again on every worker, unless an exception keeps the workers from meeting."""
        self._restored = None
        for owner, name in [(self.precision_plugin, "clip_grad_by_norm"), *((o, "norm") for o in self._measuring())]:
            vars(owner).pop(name, None)
        self._part_ways()
        if self._holdings is not None and not self.alone:
            for parameter in self._module.parameters():
                parameter.grad = None
            self._holdings.give_back(self.root_device)
        self._holdings, self._pipe, self._logs = None, None, None
        super().teardown()

    # ---- what users watch ---------------------------------------------------------------------------------------

    def summary(self) -> dict[str, str]:
        """The plan in words."""
        together = f", replicas by {self.replicas!r}" if self.num_pipelines > 1 else ""
        return {"pipelines": f"{self.num_pipelines} of {self.num_stages} stages{together}", **self.plans.summary()}

    def measured(self) -> dict[str, Span]:
        """When each action of the latest step computed, on all stages of this pipeline. Collective.

        Clocks are those of the stages' hosts; on one host they are one.
        """
        assert self._pipe is not None
        rows = [self._spans] if self._pipe.over is None else gather_objects(self._pipe.over, self._spans)
        return {str(action): span for row in rows for action, span in row.items()}

    def expected(self) -> ScheduleForecast | None:
        """What the timeline says of a step with the latest plan; None before the first step or without measurements."""
        return self.plans.expected()

    # ---- names --------------------------------------------------------------------------------------------------

    @classmethod
    def register_strategies(cls, strategy_registry: Any = StrategyRegistry) -> None:
        """`token_pipeline` and its variants for other ways to start processes."""
        names.register(strategy_registry, "token_pipeline", cls, "token-level pipeline of stages")


def _finite(gradients: Sequence[Tensor | None]) -> bool:
    return all(bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None)
