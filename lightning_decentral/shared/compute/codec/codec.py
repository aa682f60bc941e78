"""Codecs: message compression as a value, from a message to the tensors of a payload and back.

The codecs of this module send every element, as it is (`Plain`) or rounded to a smaller float type.

    payload = encode(message, estimate)        decoded = decode(payload, estimate)

The sender decodes its own payload, too. The decoded message `sent` is thus equal at both ends of a link, and the
correction x_i += rate * (mixed_i - sent_i) takes from one worker what it gives to another. With W doubly stochastic
the mean of the workers is thus kept to rounding under every codec, however coarse.

To add a codec, subclass `Codec` with `parts`, `encode` and `decode` (copy `Int8` in `quantize`), add a line to
`codec/__init__` and `gossip/__init__`, and `conf/strategy/codec/NAME.yaml`: links, error feedback, averages and tests
then use it. Forecasts assume the slowest codec's speed until `gossip.round_cost.CODECS` has its own."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

Payload = Sequence[Tensor]


class PayloadPart(NamedTuple):
    """One tensor of a payload."""

    elements: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.itemsize


class Frame(NamedTuple):
    """Inputs of encoding and decoding in addition to the message.

    `key` seeds the sender's random rounding; `estimate` is the message decoded last on this link, for codecs that
    remember it."""

    key: int = 0
    estimate: Tensor | None = None


class Codec(ABC):
    """Compresses messages, for `codec=` of gossip and of compressed averages: real floating-point tensors [n].

    A codec is a frozen value, equal on all workers. A subclass must define `parts`, `encode` and `decode`."""

    remembers: ClassVar[bool] = False
    """True where both ends of a link keep an estimate of what the receiver knows."""
    complete: ClassVar[bool] = True
    """True where the codec may encode parameters themselves. Else elements are missing or coarse, and the codec needs
    `DifferenceCompression` around it."""
    encodes: ClassVar[bool] = True
    """True where messages are encoded. Else they are sent as they are, and groups of workers may all-reduce them."""

    whole: ClassVar[bool] = True
    """True where each element of a message arrives in each round, if coarse. Else some elements arrive rounds later."""

    @abstractmethod
    def parts(self, length: int, dtype: torch.dtype) -> tuple[PayloadPart, ...]:
        """Return the payload's tensors, as numbers of elements and types, of a message of `length` elements."""

    @abstractmethod
    def encode(self, message: Tensor, payload: Payload, frame: Frame) -> None:
        """Fill the payload with the encoded message. The message itself is unchanged."""

    @abstractmethod
    def decode(self, payload: Payload, out: Tensor, frame: Frame) -> None:
        """Fill `out` with the message that a receiver decodes from the payload."""

    def replace(self, message: Tensor, payload: Payload, frame: Frame) -> None:
        """Encode the message, and overwrite it by what its receivers decode."""
        self.encode(message, payload, frame)
        self.decode(payload, message, frame)  # now the sender has the same values as its receivers

    def residual(self, message: Tensor, payload: Payload, frame: Frame) -> None:
        """Encode the message, and overwrite it by what its receivers don't get: message - decoded."""
        decoded = message.clone()  # becomes the message that receivers decode
        self.replace(decoded, payload, frame)
        message.sub_(decoded)

    def bytes(self, length: int, dtype: torch.dtype) -> int:
        """Return the bytes of a payload on the wire; errors as `checked_parts`."""
        return sum(part.bytes for part in self.checked_parts(length, dtype))

    def checked_parts(self, length: int, dtype: torch.dtype) -> tuple[PayloadPart, ...]:
        """Return `parts`. ValueError: the message's type is not real floating point."""
        if not dtype.is_floating_point:
            raise ValueError(f"{type(self).__name__} encodes real floating-point numbers, got {dtype}: use Plain()")
        return self.parts(length, dtype)


class _Copied(Codec):
    """Copies the message to a payload of some type."""

    def encode(self, message: Tensor, payload: Payload, frame: Frame) -> None:
        payload[0].copy_(message)

    def decode(self, payload: Payload, out: Tensor, frame: Frame) -> None:
        out.copy_(payload[0])


@dataclass(frozen=True)
class Plain(_Copied):
    """decoded = message, of any type: nothing is encoded or copied. Bytes: n * itemsize."""

    encodes = False

    def parts(self, length: int, dtype: torch.dtype) -> tuple[PayloadPart, ...]:
        return (PayloadPart(length, dtype),)

    # Integers and complex numbers travel, too.
    checked_parts = parts


class _Cast(_Copied):
    """decoded = round(message) to the nearest value of a smaller type; a message of a type as small is unchanged."""

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

    A number over 65504 becomes infinity: receivers refuse the message, and the sender raises an error."""

    narrow = torch.float16
