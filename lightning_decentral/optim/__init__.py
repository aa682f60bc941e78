"""Optimizers made for gossip: Adam over windows of steps (`AccumAdam`), Adam with quasi-global moments.

They are ordinary torch optimizers, for any strategy. Public: all names below.
"""

from typing import TYPE_CHECKING

from lightning_decentral.shared import lazy_exports

if TYPE_CHECKING:
    from lightning_decentral.optim.accum import AccumAdam as AccumAdam
    from lightning_decentral.optim.accum import AccumAdamW as AccumAdamW
    from lightning_decentral.optim.quasi_global import QuasiGlobalAdam as QuasiGlobalAdam

__getattr__, __all__ = lazy_exports(__name__)
