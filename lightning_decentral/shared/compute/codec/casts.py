"""Codecs that send every element: messages as they are (`Plain`), or rounded to smaller float types."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_decentral.shared.compute.codec.codec import Codec, Frame, Payload, PayloadPart


class _Copied(Codec):
    """A copy of the message in some type."""

    def encode(self, message: Tensor, payload: Payload, frame: Frame) -> None:
        payload[0].copy_(message)

    def decode(self, payload: Payload, out: Tensor, frame: Frame) -> None:
        out.copy_(payload[0])


@dataclass(frozen=True)
class Plain(_Copied):
    """decoded = message, in its own type, whatever that is; nothing is copied. Bytes: n * itemsize."""

    encodes = False

    def parts(self, length: int, dtype: torch.dtype) -> tuple[PayloadPart, ...]:
        return (PayloadPart(length, dtype),)

    # Integers and complex numbers travel, too.
    checked_parts = parts


class _Cast(_Copied):
    """decoded = round(message), to the nearest value of a type; a message of a type as small is sent as it is."""

    narrow: ClassVar[torch.dtype]

    def parts(self, length: int, dtype: torch.dtype) -> tuple[PayloadPart, ...]:
        return (PayloadPart(length, self.narrow if self.narrow.itemsize < dtype.itemsize else dtype),)


@dataclass(frozen=True)
class Float32(_Cast):
    """decoded = float32(message). Bytes: 4 n; messages of 4 bytes an element or fewer are sent as they are."""

    narrow = torch.float32


@dataclass(frozen=True)
class BFloat16(_Cast):
    """decoded = bfloat16(message), |error| <= 2^-9 |message|. Bytes: 2 n. The range is float32's."""

    narrow = torch.bfloat16


@dataclass(frozen=True)
class Float16(_Cast):
    """decoded = float16(message), |error| <= 2^-12 |message| from 6e-5 up. Bytes: 2 n.

    Beyond 65504 it is infinite, which receivers refuse and the sender raises.
    """

    narrow = torch.float16
