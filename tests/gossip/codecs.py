"""Every codec of the face, constructed: a new class joins all tests by being there."""

from dataclasses import MISSING, fields

import torch
from torch import Tensor

from lightning_decentral.gossip import Codec, DifferenceCompression, Int2, Int4, Int8, Plain, TopK
from lightning_decentral.shared.compute import codec as face
from lightning_decentral.shared.compute.codec import Frame
from tests.exported import concrete

# More than the class without arguments, and classes that need some; small blocks, for small messages.
INSTANCES: dict[type[Codec], list[Codec]] = {
    Int8: [Int8(), Int8(block=7)],
    Int4: [Int4(), Int4(block=7)],
    Int2: [Int2(), Int2(block=7)],
    TopK: [TopK(), TopK(fraction=0.3, block=8)],
    DifferenceCompression: [
        DifferenceCompression(Int8(block=8)),
        DifferenceCompression(Int4(block=8)),
        DifferenceCompression(TopK(fraction=0.3, block=8)),
    ],
}


def classes() -> list[type[Codec]]:
    """Concrete codecs that the face exports, in alphabetical order."""
    return [cls for cls in concrete(face, Codec) if not cls.__name__.startswith("_")]


def instances() -> list[Codec]:
    return [codec for cls in classes() for codec in _instances(cls)]


def _instances(cls: type[Codec]) -> list[Codec]:
    needed = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
    assert cls in INSTANCES or not needed, f"{cls.__name__} needs {needed}: add an instance to INSTANCES"
    return INSTANCES.get(cls) or [cls()]


def usable() -> list[Codec]:
    """Those that a run may use as they are, without the one that changes nothing."""
    return [codec for codec in instances() if codec.complete and codec != Plain()]


def payload(codec: Codec, length: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.empty(part.elements, dtype=part.dtype) for part in codec.parts(length, dtype)]


def round_trip(codec: Codec, message: Tensor, key: int = 0) -> Tensor:
    """What a hearer makes of a message; estimates at zero."""
    estimate = torch.zeros_like(message) if codec.remembers else None
    frame = Frame(key, estimate)
    parts, decoded = payload(codec, len(message), message.dtype), torch.empty_like(message)
    codec.encode(message, parts, frame)
    codec.decode(parts, decoded, frame)
    return decoded
