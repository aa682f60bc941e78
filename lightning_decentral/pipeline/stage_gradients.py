"""Training step of a stage: gradients unscaled, averaged over replicas, summed where tied, passed to Lightning.

In an evaluation every stage gets the model's output; before that, it gets the last stage's buffers."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_decentral.pipeline.compute.adapters import find
from lightning_decentral.pipeline.compute.intercept import answering
from lightning_decentral.pipeline.compute.model import Call, Pipelined, Staged
from lightning_decentral.pipeline.compute.stage import deliver
from lightning_decentral.pipeline.logs import Logs
from lightning_decentral.pipeline.plan.schedule import Action
from lightning_decentral.pipeline.plan.slicing import Planned, Slicing, Uniform
from lightning_decentral.pipeline.users_step import TrainingStep
from lightning_decentral.pipeline.wire.ownership import Ownership
from lightning_decentral.pipeline.wire.slice_planner import SlicePlanner
from lightning_decentral.pipeline.wire.stage_runner import StageRunner
from lightning_decentral.shared.evaluation import Evaluation
from lightning_decentral.shared.plan.timeline import Span
from lightning_decentral.shared.wire.pipeline_replicas import Bond
from lightning_decentral.shared.wire.transport import Wire

if TYPE_CHECKING:
    import lightning_decentral.pipeline.strategy as strategy

Gradients = list[Tensor | None]


def pipelined(module: LightningModule, slicing: Slicing | None, device: torch.device) -> Pipelined:
    """Return the model that is cut into stages, to be trained on this kind of device. ValueError: the model can't be
    cut along tokens, but a slicing other than the default was given."""
    model = module.pipeline_stages() if isinstance(module, Staged) else find(module, device)
    if not model.sliceable and slicing not in (None, Planned(), Uniform(1)):
        raise ValueError(
            f"{type(model.module).__name__} needs all of an input at once (attention in both directions, or no "
            f"tokens at all), so it can't be cut into slices: leave slicing={slicing} out and use "
            "microbatches. On the command line: strategy/slicing=planned, the default, and strategy.microbatches=4"
        )
    return model


class StageTraining:
    """Trains one stage of the pipeline on this worker."""

    def __init__(
        self,
        module: LightningModule,
        pipe: StageRunner,
        holdings: Ownership,
        plans: SlicePlanner,
        *,
        slicing: Slicing | None,  # where sequences are cut; None: `Planned()`. A model without tokens has one slice
        summary: Callable[[], Mapping[str, str]],  # the plan as text, logged on worker 0 for each new plan
    ) -> None:
        self.pipe, self.holdings = pipe, holdings
        self._module, self._plans, self._summary = module, plans, summary
        # Turns this stage's gradients into the optimizer's gradients; collective over replicas.
        self.average: Callable[[Gradients, Sequence[nn.Parameter]], Gradients] = Bond().gradients
        self._slicing = (slicing or Planned()) if pipe.model.sliceable else Uniform(1)
        self._logs = Logs(module)
        self.spans: dict[Action, Span] = {}  # when each action of the latest step computed
        self.seconds = 0.0  # of the latest step's forward and backward on this stage, including waits
        blocks = pipe.place.stop_block - pipe.place.first_block
        held = f"{blocks} blocks, {sum(p.numel() for p in holdings.kept):,} parameters"
        plans.stages = pipe.gather(held)

    def step(
        self, precision: Precision, microbatches: int, wire: Wire | None, args: Any, kwargs: Any
    ) -> Tensor | dict[Any, Any]:
        """Run the whole forward and backward; the returned loss passes the gradients to Lightning's own backward.
        `wire`: of all workers of all pipelines, which take equal slices."""
        roll = None if wire is None else wire.roll
        scaler = precision.scaler if isinstance(precision, MixedPrecision) else None
        scale = 1.0 if scaler is None else float(scaler.get_scale())
        step = TrainingStep(self.pipe, self._module, self._logs, microbatches, scale)
        every = [p for p in self.holdings.order if p in self.holdings.kept]
        before = [p.grad for p in every]  # gradients of accumulated batches, put back below
        for parameter in every:
            parameter.grad = None  # so that only this batch's gradients are divided and averaged
        with precision.train_step_context(), closing(step):
            step.read(*args, **kwargs)
            self.holdings.refuse_changed()
            try:
                slices = self._plans.plan(self._slicing, step.calls[0], self.pipe, roll, self._log_plan)
                begin = time.perf_counter()
                self.spans = self.pipe.train(step.calls, slices, step.finish).spans
            except torch.OutOfMemoryError as error:
                raise RuntimeError(
                    f"stage {self.pipe.rank} ran out of memory: take more slices or microbatches, "
                    f"activations=Recompute(), or fewer blocks on this stage ({'; '.join(self._plans.stages)})"
                ) from error
            self.seconds = time.perf_counter() - begin
        trained = [p for p in every if p.requires_grad]  # only now: the step may have thawed some
        own = [p.grad for p in trained if p.grad is not None]
        result, others = step.conclude(own, self.holdings)
        for parameter, gradient in zip(trained, self.average([p.grad for p in trained], trained), strict=True):
            parameter.grad = gradient
        # Last: other stages' replicas add in another order, but the sum of two means is the same at both holders.
        self.pipe.tie(self.holdings.tied, self.holdings.outside)
        gradients = [p.grad for p in trained]
        for parameter, gradient in zip(every, before, strict=True):
            parameter.grad = gradient
        exact = torch.float64 if any(p.dtype == torch.float64 for p in trained) else torch.float32
        loss = deliver(result.to(exact), gradients, trained)
        return {"loss": loss, **others} if others else loss

    def _log_plan(self) -> None:
        rank_zero_info("\n".join(f"{name}: {value}" for name, value in self._summary().items()))
        slices = [*self._plans.slices.values()][-1]
        if self.pipe.size > 1 and len(slices) * self._plans.microbatches == 1:
            rank_zero_info(NOT_FASTER)


NOT_FASTER = (
    "one slice and one micro-batch: each stage waits for the one before, so this token pipeline can't be faster than "
    "one device. Give strategy.microbatches=4, longer sequences, or slices by strategy/slicing=uniform"
)


class StageEvaluation(Evaluation):
    """Evaluation through a pipeline: all stages get the last stage's buffers before it, and before the mean model."""

    _strategy: "strategy.TokenPipelineStrategy"

    def _begin(self) -> None:
        self._share_buffers()
        super()._begin()

    def arrive(self) -> None:
        self._share_buffers()
        super().arrive()

    def _share_buffers(self) -> None:
        if (layout := self._strategy.checkpoints.layout) is not None:
            self._strategy.meet(lambda: layout.share_buffers(self._strategy.root_device))


def evaluated(pipe: StageRunner, plans: SlicePlanner, step: Callable[[], Any]) -> Any:
    """Run the user's validation, test or predict step; the pipeline answers its calls of the model.

    Every stage runs the same step with the same answers, so that whatever it logs or gathers is complete. The step may
    call the model any number of times."""

    def answer(call: Call) -> Any:
        length = pipe.model.length(call)
        # Nothing is measured for an evaluation: with 2 P equal slices the bubble is below a third.
        slices = Uniform(min(length, 2 * pipe.size)).slices(length, plans.situation(pipe.size))
        return pipe.model.answer(call, pipe.evaluate(call, slices))

    with answering(pipe.model, answer):
        return step()
