"""Stages are measured by all together, in the same steps; a plan is the first pipeline's."""

from dataclasses import replace

import pytest
import torch

from lightning_decentral.pipeline import ExactActivations, Keep, OneForwardOneBackward, Planned
from lightning_decentral.pipeline.compute.causal.trial import adapted
from lightning_decentral.pipeline.compute.model import Call, StagePlace
from lightning_decentral.pipeline.plan.cost import CostModel, Link, StageCost
from lightning_decentral.pipeline.wire import slice_planner as planning
from lightning_decentral.pipeline.wire.slice_planner import SlicePlanner
from lightning_decentral.pipeline.wire.stage_runner import StageRunner
from lightning_decentral.shared.wire.transport import GlooTransport
from tests.pipeline.causal import built
from tests.world import world

COSTS = CostModel(((8, 1e-3 / 3), (16, 2e-3 / 3)), (1e-5, 1e-7, 0.0, 1e-9 / 7), 0.01)
PROFILE = StageCost(
    COSTS, replace(COSTS, alone=tuple((n, 2 * s) for n, s in COSTS.alone)), 1e-4, Link(1e-4 / 3, 1e-7 / 3), 1.1
)


def pipe(place: StagePlace) -> StageRunner:
    options = {"activations": Keep(), "boundary": ExactActivations(), "schedule": OneForwardOneBackward()}
    return StageRunner(adapted(built("llama", torch.float32)), place, None, {}, device=torch.device("cpu"), **options)


@pytest.mark.threads
def test_the_first_pipelines_measurements_are_every_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pipelines of two stages: a length has one plan."""

    def worker(group):  # type: ignore[no-untyped-def]
        over, rank = GlooTransport(group), group.rank()
        own = pipe(StagePlace(2 * (rank % 2), 2 * (rank % 2) + 2, rank % 2 == 0, rank % 2 == 1))
        own.size = 2
        plans = SlicePlanner(OneForwardOneBackward(), 1)
        monkeypatch.setattr(planning, "profile", lambda pipe, _: replace(PROFILE, loss_seconds=pipe.seconds))
        own.seconds = float(rank)
        plans.plan(Planned(), Call(torch.zeros(2, 24, dtype=torch.int64)), own, over, lambda: None)
        return [cost.loss_seconds for cost in plans.profiles]

    assert world(4, worker) == [[0.0, 1.0]] * 4


@pytest.mark.threads
def test_pipelines_with_sequences_of_different_lengths_measure_in_the_same_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the first pipeline's: one that decided by its own would wait for the others in the second step."""
    lengths = [(24, 40), (40, 24), (32, 48)]

    def worker(group):  # type: ignore[no-untyped-def]
        own, over = pipe(StagePlace(0, 4, True, True)), GlooTransport(group)
        plans = SlicePlanner(OneForwardOneBackward(), 1)
        for both in lengths:
            plans.plan(Planned(), Call(torch.zeros(2, both[over.rank], dtype=torch.int64)), own, over, lambda: None)
        return [cost.loss_seconds for cost in plans.profiles]

    monkeypatch.setattr(planning, "profile", lambda _, call: replace(PROFILE, loss_seconds=float(call.inputs.shape[1])))
    assert world(2, worker) == [[40.0], [40.0]]
