"""Compressed data-parallel training (quantized all-reduce): `ddp`'s algorithm on gradients of a few bits.

`strategy` runs it under Lightning's Trainer, `fabric` under Fabric; `shared.wire.compressed_mean` computes the average,
also for gossip's islands and pipelines' replicas. Public: all names below."""

from typing import TYPE_CHECKING

from lightning_decentral.shared import lazy_exports

if TYPE_CHECKING:
    from lightning_decentral.compressed.fabric import FabricCompressedStrategy as FabricCompressedStrategy
    from lightning_decentral.compressed.plan.forecast import CompressedForecast as CompressedForecast
    from lightning_decentral.compressed.strategy import CompressedStrategy as CompressedStrategy

__getattr__, __all__ = lazy_exports(__name__)
