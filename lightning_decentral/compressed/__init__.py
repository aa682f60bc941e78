"""Compressed data-parallel training (quantized all-reduce): `ddp`'s algorithm on gradients of a few bits.

`strategy` binds it to Lightning, `fabric` to loops with Fabric; the average itself is `shared.wire.compressed_mean`,
which islands of gossip and pipelines' replicas use, too. Public: all names below.
"""

from typing import TYPE_CHECKING

from lightning_decentral.shared import lazy_exports

if TYPE_CHECKING:
    from lightning_decentral.compressed.fabric import FabricCompressedStrategy as FabricCompressedStrategy
    from lightning_decentral.compressed.plan.forecast import CompressedForecast as CompressedForecast
    from lightning_decentral.compressed.strategy import CompressedStrategy as CompressedStrategy

__getattr__, __all__ = lazy_exports(__name__)
