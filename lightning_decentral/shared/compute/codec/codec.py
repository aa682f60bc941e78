"""Codecs: message compression as a value, from a message to the tensors of a payload and back; those that send every
element, as it is (`Plain`) or rounded to a smaller float type.

    payload = encode(message, estimate)        decoded = decode(payload, estimate)

The sender decodes its own payload, too. What it is thought to have sent, `sent`, is thus the same at both ends of a
link, and the correction x_i += rate * (mixed_i - sent_i) takes from one worker what it gives to another: with W doubly
stochastic the mean of the workers is kept to rounding under every codec, however coarse.

To add one, subclass `Codec`: `parts`, `encode` and `decode` (`Int8` in `quantize` is the one to copy), with a line in
`codec/__init__` and `gossip/__init__`, and `conf/strategy/codec/NAME.yaml`: links, error feedback, averages and tests
read it. Forecasts take it to be as slow as the slowest codec, until it is measured: `gossip.round_cost.CODECS`.
"""

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

    `key` is the sender's, for rounding at random; `estimate` what was decoded last on this link, for codecs that
    remember.
    """

    key: int = 0
    estimate: Tensor | None = None


class Codec(ABC):
    """Codec of messages, for `codec=` (of gossip, of compressed averages): encodes real floating-point messages [n].

    A frozen value, equal on all workers. `parts`, `encode` and `decode` must be written.
    """

    remembers: ClassVar[bool] = False
    """True where both ends of a link keep an estimate of what the receiver knows."""
    complete: ClassVar[bool] = True
    """True where parameters may be sent by it alone. Else elements are missing or coarse, and it is for differences
    (`DifferenceCompression`)."""
    encodes: ClassVar[bool] = True
    """True where messages are encoded. Else they travel as they are, and groups of equals may all-reduce them."""

    whole: ClassVar[bool] = True
    """True where each element of a message arrives in each round, if coarse. Else the rest comes rounds later."""

    @abstractmethod
    def parts(self, length: int, dtype: torch.dtype) -> tuple[PayloadPart, ...]:
        """The tensors of the payload of a message of `length` numbers of this type."""

    @abstractmethod
    def encode(self, message: Tensor, payload: Payload, frame: Frame) -> None:
        """Fill the payload. The message stays as it is."""

    @abstractmethod
    def decode(self, payload: Payload, out: Tensor, frame: Frame) -> None:
        """Fill `out` with what a receiver decodes from the payload."""

    def replace(self, message: Tensor, payload: Payload, frame: Frame) -> None:
        """`encode`, and overwrite the message by what its receivers decode."""
        self.encode(message, payload, frame)
        self.decode(payload, message, frame)  # the sender has what its receivers have

    def residual(self, message: Tensor, payload: Payload, frame: Frame) -> None:
        """`encode`, and overwrite the message by what its receivers don't get: message - decoded."""
        decoded = message.clone()  # becomes what receivers decode
        self.replace(decoded, payload, frame)
        message.sub_(decoded)

    def bytes(self, length: int, dtype: torch.dtype) -> int:
        """Bytes of a payload on the wire; errors as `checked_parts`."""
        return sum(part.bytes for part in self.checked_parts(length, dtype))

    def checked_parts(self, length: int, dtype: torch.dtype) -> tuple[PayloadPart, ...]:
        """`parts`. ValueError: the type is not real floating point."""
        if not dtype.is_floating_point:
            raise ValueError(f"{type(self).__name__} encodes real floating-point numbers, got {dtype}: use Plain()")
        return self.parts(length, dtype)


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
