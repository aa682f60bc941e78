"""Structured partial backpropagation: the backward stops at a cut, its depth planned for each worker and step.

`strategy` binds it to Lightning, `callbacks` are what users watch, `dry_run` is a training step without a trace.
Below: `plan` (depths: values without torch), `compute` (cuts), `wire` (gradients). Public: all names below.
"""

from lightning_decentral.partial.callbacks import PartialBackpropMonitor, PartialBackpropTable, PartialBackward
from lightning_decentral.partial.compute.frozen_update import Absent, Decay, Skip
from lightning_decentral.partial.plan.cost import Balance, Blocks, Parameters, SavedBytes, Seconds
from lightning_decentral.partial.plan.depth import Balanced, DepthAssignment, Full, PerWorker, Staircase, Temporal
from lightning_decentral.partial.plan.depth_order import Cyclic, Order, Random
from lightning_decentral.partial.plan.freezing import AutoFreeze, FreezeOut, PipeTransformer
from lightning_decentral.partial.strategy import PartialBackpropStrategy

__all__ = [
    "Absent",
    "AutoFreeze",
    "Balance",
    "Balanced",
    "Blocks",
    "Cyclic",
    "Decay",
    "DepthAssignment",
    "FreezeOut",
    "Full",
    "Order",
    "Parameters",
    "PartialBackpropMonitor",
    "PartialBackpropStrategy",
    "PartialBackpropTable",
    "PartialBackward",
    "PerWorker",
    "PipeTransformer",
    "Random",
    "SavedBytes",
    "Seconds",
    "Skip",
    "Staircase",
    "Temporal",
]
