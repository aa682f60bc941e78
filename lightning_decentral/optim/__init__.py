"""Optimizers made for gossip: Muon with AdamW, Adam over windows of steps (`AccumAdam`); warm-up.

These optimizers are ordinary torch optimizers, for any strategy. Public: all names below."""

from typing import TYPE_CHECKING

from lightning_decentral.shared import lazy_exports

if TYPE_CHECKING:
    from lightning_decentral.optim.accum import AccumAdam as AccumAdam
    from lightning_decentral.optim.accum import AccumAdamW as AccumAdamW
    from lightning_decentral.optim.muon import Muon as Muon
    from lightning_decentral.optim.roles import muon_groups as muon_groups
    from lightning_decentral.optim.warmup import MomentumWarmup as MomentumWarmup

__getattr__, __all__ = lazy_exports(__name__)
