"""Token-level pipeline parallelism (TeraPipe): slices of a sequence follow each other through a model's stages.

`strategy` binds it to Lightning; its parts are `stage_layout`, `stage_gradients`, `users_step`, `totals` and
`checkpoint`; `report` is what users watch. Below: `plan` (schedules and slices: values without torch), `compute`
(what a stage computes), `wire` (what stages send). Public: all names below.

A stage with a wrong gradient: `compute.stage` and `compute.weight_grad`, then `compute.kv_cache` (slices),
`wire.stage_runner` (tied weights), `wire.executor` (what arrives), `stage_gradients` (which optimizer gets them,
averages over replicas), `users_step` (the loss)."""

from typing import TYPE_CHECKING

from lightning_decentral.shared import lazy_exports

if TYPE_CHECKING:
    from lightning_decentral.pipeline.compute.adapters import Chain as Chain
    from lightning_decentral.pipeline.compute.adapters import blocks_of as blocks_of
    from lightning_decentral.pipeline.compute.stage import Activations as Activations
    from lightning_decentral.pipeline.compute.stage import Keep as Keep
    from lightning_decentral.pipeline.compute.stage import Recompute as Recompute
    from lightning_decentral.pipeline.plan.forecast import Pipelining as Pipelining
    from lightning_decentral.pipeline.plan.partition import Counted as Counted
    from lightning_decentral.pipeline.plan.partition import Even as Even
    from lightning_decentral.pipeline.plan.partition import Fastest as Fastest
    from lightning_decentral.pipeline.plan.partition import Partition as Partition
    from lightning_decentral.pipeline.plan.schedule import Action as Action
    from lightning_decentral.pipeline.plan.schedule import Kind as Kind
    from lightning_decentral.pipeline.plan.schedule import OneForwardOneBackward as OneForwardOneBackward
    from lightning_decentral.pipeline.plan.schedule import Schedule as Schedule
    from lightning_decentral.pipeline.plan.schedule import TeraPipe as TeraPipe
    from lightning_decentral.pipeline.plan.schedule import ZeroBubble as ZeroBubble
    from lightning_decentral.pipeline.plan.slicing import Balanced as Balanced
    from lightning_decentral.pipeline.plan.slicing import Given as Given
    from lightning_decentral.pipeline.plan.slicing import Planned as Planned
    from lightning_decentral.pipeline.plan.slicing import Situation as Situation
    from lightning_decentral.pipeline.plan.slicing import Slicing as Slicing
    from lightning_decentral.pipeline.plan.slicing import Uniform as Uniform
    from lightning_decentral.pipeline.report import PipelineReport as PipelineReport
    from lightning_decentral.pipeline.strategy import TokenPipelineStrategy as TokenPipelineStrategy
    from lightning_decentral.pipeline.wire.executor import Bfloat16Activations as Bfloat16Activations
    from lightning_decentral.pipeline.wire.executor import Boundary as Boundary
    from lightning_decentral.pipeline.wire.executor import ExactActivations as ExactActivations
    from lightning_decentral.pipeline.wire.executor import Int8Activations as Int8Activations
    from lightning_decentral.shared.wire.pipeline_replicas import AverageGradients as AverageGradients
    from lightning_decentral.shared.wire.pipeline_replicas import Replicas as Replicas

__getattr__, __all__ = lazy_exports(__name__)
