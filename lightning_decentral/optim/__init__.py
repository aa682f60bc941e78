"""Optimizers for gossip: ordinary torch optimizers, for any strategy.

`accum` averages gradients over windows before they enter Adam's moments; `quasi_global` takes the moments from where
the worker went together with its neighbours.
"""

from lightning_decentral.optim.accum import AccumAdam, AccumAdamW
from lightning_decentral.optim.quasi_global import QuasiGlobalAdam

__all__ = ["AccumAdam", "AccumAdamW", "QuasiGlobalAdam"]
