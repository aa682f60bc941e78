"""Message compression: quantization, sparsification, low rank, difference compression and its error feedback.

`codec` says what a codec is, `coder` what a worker keeps for its links. Public: all names below.
"""

from lightning_decentral.gossip.compute.codec.codec import Codec
from lightning_decentral.gossip.compute.codec.coder import Frame, MessageLayout, Payload, PayloadPart
from lightning_decentral.gossip.compute.codec.compress import DifferenceCompression, TopK
from lightning_decentral.gossip.compute.codec.low_rank import LowRank
from lightning_decentral.gossip.compute.codec.quantize import BFloat16, Float16, Float32, Int8, Plain

__all__ = [
    "BFloat16",
    "Codec",
    "DifferenceCompression",
    "Float16",
    "Float32",
    "Frame",
    "Int8",
    "LowRank",
    "MessageLayout",
    "Payload",
    "PayloadPart",
    "Plain",
    "TopK",
]
