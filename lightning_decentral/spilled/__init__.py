"""CPU offload: models larger than their device, parameters and optimizer loaded block by block (Hydra's spilling).

`strategy` binds it to Lightning. Below: `plan` (which blocks travel together), `compute` (how they do). Public: all
names below.
"""

from lightning_decentral.spilled.compute.update import OnDevice, OnHost, Update
from lightning_decentral.spilled.strategy import SpilledStrategy

__all__ = [
    "OnDevice",
    "OnHost",
    "SpilledStrategy",
    "Update",
]
