"""Message compression: quantization, sparsification, difference compression and its error feedback.

`codec` has the base class, and codecs that send every element, as it is or rounded; to write a new codec, copy `Int8`
in `quantize`. `topk` has the codec that sends the largest elements, and `DifferenceCompression`. The estimates that
both ends of a link keep are in `gossip/compute`. Public: all names below."""

from typing import TYPE_CHECKING

from lightning_decentral.shared import lazy_exports

if TYPE_CHECKING:
    from lightning_decentral.shared.compute.codec.codec import BFloat16 as BFloat16
    from lightning_decentral.shared.compute.codec.codec import Codec as Codec
    from lightning_decentral.shared.compute.codec.codec import Float16 as Float16
    from lightning_decentral.shared.compute.codec.codec import Float32 as Float32
    from lightning_decentral.shared.compute.codec.codec import Frame as Frame
    from lightning_decentral.shared.compute.codec.codec import Payload as Payload
    from lightning_decentral.shared.compute.codec.codec import PayloadPart as PayloadPart
    from lightning_decentral.shared.compute.codec.codec import Plain as Plain
    from lightning_decentral.shared.compute.codec.quantize import Int2 as Int2
    from lightning_decentral.shared.compute.codec.quantize import Int4 as Int4
    from lightning_decentral.shared.compute.codec.quantize import Int8 as Int8
    from lightning_decentral.shared.compute.codec.topk import DifferenceCompression as DifferenceCompression
    from lightning_decentral.shared.compute.codec.topk import TopK as TopK

__getattr__, __all__ = lazy_exports(__name__)
