"""CPU offload: models larger than their device, parameters and optimizer loaded block by block (Hydra's spilling).

`strategy` binds it to Lightning. Below: `plan` (which blocks are loaded together), `compute` (how blocks are loaded and
run). Public: all names below."""

from typing import TYPE_CHECKING

from lightning_decentral.shared import lazy_exports

if TYPE_CHECKING:
    from lightning_decentral.spilled.compute.update import OnDevice as OnDevice
    from lightning_decentral.spilled.compute.update import OnHost as OnHost
    from lightning_decentral.spilled.compute.update import Update as Update
    from lightning_decentral.spilled.strategy import SpilledStrategy as SpilledStrategy

__getattr__, __all__ = lazy_exports(__name__)
