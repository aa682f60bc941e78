"""Optimizers made for gossip: Adam over windows of steps (`AccumAdam`), Adam with quasi-global moments.

They are ordinary torch optimizers, for any strategy. Public: all names below.
"""

from lightning_decentral.optim.accum import AccumAdam, AccumAdamW
from lightning_decentral.optim.quasi_global import QuasiGlobalAdam

__all__ = [
    "AccumAdam",
    "AccumAdamW",
    "QuasiGlobalAdam",
]
