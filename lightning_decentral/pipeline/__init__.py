"""Token-level pipeline parallelism (TeraPipe): slices of a sequence follow each other through a model's stages.

`strategy` binds it to Lightning, `training_step`, `workers` and `checkpoint` are its parts, `report` is what users
watch. Below: `plan` (schedules and slices: values without torch), `compute` (what a stage does), `wire` (what stages
send). Public: all names below.
"""

from lightning_decentral.pipeline.compute.activation_codec import (
    Bfloat16Activations,
    Boundary,
    ExactActivations,
    Int8Activations,
)
from lightning_decentral.pipeline.compute.stage import Activations, Keep, Recompute
from lightning_decentral.pipeline.plan.forecast import Pipelining
from lightning_decentral.pipeline.plan.partition import Counted, Even, Fastest, Partition
from lightning_decentral.pipeline.plan.schedule import OneForwardOneBackward, Schedule, TeraPipe, ZeroBubble
from lightning_decentral.pipeline.plan.slicing import Balanced, Given, Planned, Slicing, Uniform
from lightning_decentral.pipeline.report import PipelineReport
from lightning_decentral.pipeline.strategy import TokenPipelineStrategy
from lightning_decentral.shared.wire.replicas import AverageGradients, Replicas

__all__ = [
    "Activations",
    "AverageGradients",
    "Balanced",
    "Bfloat16Activations",
    "Boundary",
    "Counted",
    "Even",
    "ExactActivations",
    "Fastest",
    "Given",
    "Int8Activations",
    "Keep",
    "OneForwardOneBackward",
    "Partition",
    "PipelineReport",
    "Pipelining",
    "Planned",
    "Recompute",
    "Replicas",
    "Schedule",
    "Slicing",
    "TeraPipe",
    "TokenPipelineStrategy",
    "Uniform",
    "ZeroBubble",
]
