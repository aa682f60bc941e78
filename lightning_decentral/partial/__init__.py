"""Structured partial backpropagation: the backward stops at a cut, its depth planned for each worker and step.

`strategy` binds it to Lightning and `fabric` to loops with Fabric; `callbacks` are what users watch; `agreed` finds the
cuts that all workers use, by a dry run, and describes them.
Below: `plan` (depths: values without torch), `compute` (cuts), `wire` (gradients). Public: all names below."""

from typing import TYPE_CHECKING

from lightning_decentral.shared import lazy_exports

if TYPE_CHECKING:
    from lightning_decentral.partial.callbacks import PartialBackpropMonitor as PartialBackpropMonitor
    from lightning_decentral.partial.callbacks import PartialBackpropTable as PartialBackpropTable
    from lightning_decentral.partial.callbacks import PartialBackward as PartialBackward
    from lightning_decentral.partial.compute.frozen_update import Absent as Absent
    from lightning_decentral.partial.compute.frozen_update import Decay as Decay
    from lightning_decentral.partial.compute.frozen_update import Forget as Forget
    from lightning_decentral.partial.compute.frozen_update import Skip as Skip
    from lightning_decentral.partial.fabric import FabricPartialBackpropStrategy as FabricPartialBackpropStrategy
    from lightning_decentral.partial.plan.cost import Balance as Balance
    from lightning_decentral.partial.plan.cost import Blocks as Blocks
    from lightning_decentral.partial.plan.cost import Parameters as Parameters
    from lightning_decentral.partial.plan.cost import SavedBytes as SavedBytes
    from lightning_decentral.partial.plan.cost import Seconds as Seconds
    from lightning_decentral.partial.plan.depth import Balanced as Balanced
    from lightning_decentral.partial.plan.depth import Cyclic as Cyclic
    from lightning_decentral.partial.plan.depth import DepthAssignment as DepthAssignment
    from lightning_decentral.partial.plan.depth import Full as Full
    from lightning_decentral.partial.plan.depth import Order as Order
    from lightning_decentral.partial.plan.depth import PerWorker as PerWorker
    from lightning_decentral.partial.plan.depth import Random as Random
    from lightning_decentral.partial.plan.depth import Staircase as Staircase
    from lightning_decentral.partial.plan.depth import Temporal as Temporal
    from lightning_decentral.partial.plan.depth import contributors as contributors
    from lightning_decentral.partial.plan.selection import BlockCoordinate as BlockCoordinate
    from lightning_decentral.partial.plan.selection import Lisa as Lisa
    from lightning_decentral.partial.plan.selection import Selection as Selection
    from lightning_decentral.partial.strategy import PartialBackpropStrategy as PartialBackpropStrategy

__getattr__, __all__ = lazy_exports(__name__)
