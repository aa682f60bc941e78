"""Evaluation through a pipeline: every stage gets the model's output, and before it the last stage's buffers."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_decentral.pipeline.compute.intercept import answering
from lightning_decentral.pipeline.compute.model import Call
from lightning_decentral.pipeline.plan.slicing import Uniform
from lightning_decentral.pipeline.wire.slice_planner import SlicePlanner
from lightning_decentral.pipeline.wire.stage_runner import StageRunner
from lightning_decentral.shared.evaluation import Evaluation

if TYPE_CHECKING:
    from lightning_decentral.pipeline.strategy import TokenPipelineStrategy


class StageEvaluation(Evaluation):
    """The same; before it, and before a mean is taken, all stages get the last one's buffers."""

    def __init__(self, of: "TokenPipelineStrategy") -> None:
        super().__init__(of)
        self._stage = of

    def _begin(self) -> None:
        self._share()
        super()._begin()

    def arrive(self) -> None:
        self._share()
        super().arrive()

    def _share(self) -> None:
        layout = self._stage.checkpoints.layout
        if layout is not None:
            self._stage.meet(lambda: layout.share_buffers(self._stage.root_device))


def evaluated(pipe: StageRunner, plans: SlicePlanner, step: Callable[[], Any]) -> Any:
    """Run a validation, test or predict step of the user's, its model calls answered by the pipeline.

    The same step with the same answers on every stage, so that whatever it logs or gathers is whole. It may call the
    model any number of times.
    """

    def answer(call: Call) -> Any:
        length = pipe.model.length(call)
        # Nothing is measured for an evaluation: with 2 P equal slices the bubble is below a third.
        slices = Uniform(min(length, 2 * pipe.size)).slices(length, plans.situation(pipe.size))
        return pipe.model.answer(call, pipe.evaluate(call, slices))

    with answering(pipe.model, answer):
        return step()
