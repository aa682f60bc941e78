"""Payload and layout of a message: what a codec makes of it, and where its matrices lie."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_decentral.shared.compute.buckets import Matrix

Payload = Sequence[Tensor]


class PayloadPart(NamedTuple):
    """One tensor of a payload."""

    elements: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True)
class MessageLayout:
    """A message of `length` numbers, some of which form matrices: message[offset : offset + rows * columns]."""

    length: int
    matrices: tuple[Matrix, ...] = ()

    @classmethod
    def of(cls, length: int, matrices: Sequence[Matrix], bucket: int) -> "MessageLayout":
        """Of a message that holds the bucket's `bucket` elements, or several such pieces one behind the other."""
        starts = range(0, length - length % bucket, bucket)
        return cls(length, tuple(m._replace(offset=start + m.offset) for start in starts for m in matrices))


class Frame(NamedTuple):
    """What encoding and decoding may use beside the message.

    `key` is the sender's, for rounding at random; `estimate` what was decoded last on this link, for codecs that
    remember.
    """

    layout: MessageLayout
    key: int = 0
    estimate: Tensor | None = None
