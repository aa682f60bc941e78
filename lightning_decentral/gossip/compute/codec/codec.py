"""What travels: how a message becomes the tensors of a payload, and what its hearers make of them.

    payload = encode(message, estimate)        decoded = decode(payload, estimate)

The sender decodes its own payload, too. What it is thought to have said, `sent`, is thus the same at both ends of a
link, and the correction x_i += rate * (mixed_i - sent_i) takes from one worker what it gives to another: with W doubly
stochastic the mean of the workers is kept to rounding under every codec, however coarse.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import Weights
from lightning_decentral.shared.compute.buckets import Matrix

Payload = Sequence[Tensor]


class PayloadPart(NamedTuple):
    """One tensor of a payload."""

    elements: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """On the wire."""
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


class Coding(ABC):
    """What `GossipStrategy(codec=...)` takes: how messages travel on links. A value: equal on all workers."""

    remembers: ClassVar[bool] = False
    """Whether both ends of a link keep something about it."""
    complete: ClassVar[bool] = True
    """Whether every element arrives. Where not, the codec compresses differences only (`DifferenceCompression`)."""

    def check(self, topology: Topology, size: int, weights: Weights, delay: int) -> None:
        """ValueError, before any worker talks, where links are needed that the plan doesn't have."""
        return

    @abstractmethod
    def bytes(self, layout: "MessageLayout", dtype: torch.dtype) -> int:
        """Bytes of a payload on the wire."""


class Codec(Coding):
    """Encodes real floating-point messages [n], whatever the hearer has."""

    @abstractmethod
    def parts(self, layout: MessageLayout, dtype: torch.dtype) -> tuple[PayloadPart, ...]:
        """The tensors of the payload of a message with this layout and type."""

    @abstractmethod
    def encode(self, message: Tensor, payload: Payload, frame: Frame) -> None:
        """Fill the payload. The message stays as it is."""

    @abstractmethod
    def decode(self, payload: Payload, out: Tensor, frame: Frame) -> None:
        """Fill `out` with what the hearer makes of the payload."""

    def replace(self, message: Tensor, payload: Payload, frame: Frame) -> None:
        """`encode`, and overwrite the message by what its hearers make of it."""
        self.encode(message, payload, frame)
        self.decode(payload, message, frame)

    def bytes(self, layout: MessageLayout, dtype: torch.dtype) -> int:
        """Bytes of a payload on the wire; errors as `checked_parts`."""
        return sum(part.bytes for part in self.checked_parts(layout, dtype))

    def checked_parts(self, layout: MessageLayout, dtype: torch.dtype) -> tuple[PayloadPart, ...]:
        """`parts`.

        Raises:
            ValueError: the type is not real floating point.
        """
        if not dtype.is_floating_point:
            raise ValueError(f"{type(self).__name__} encodes real floating-point numbers, got {dtype}: use Plain()")
        return self.parts(layout, dtype)


def check_codec(state: Mapping[str, Any], codec: str) -> None:
    """ValueError unless the state was saved under this codec."""
    if state["codec"] != codec:
        raise ValueError(
            f"the checkpoint's messages were encoded by {state['codec']}, this run has {codec}: resume with the same "
            "codec, or delete the checkpoint's .workers folder to start from the mean"
        )


LARGEST_BLOCK = 2**16
PIECES_ON_DEVICE = 64
"""Worked on at once: a launch costs a device more than memory that is no cache."""


def check_block(block: int, remedy: str) -> None:
    """ValueError unless it is in 1 .. 65536."""
    if not 1 <= block <= LARGEST_BLOCK:
        raise ValueError(f"a codec's block must be in 1 .. {LARGEST_BLOCK}, got {block}: {remedy}")


def piece_length(block: int) -> int:
    """Elements of as many whole blocks as are good to work on at once on a host."""
    return LARGEST_BLOCK - LARGEST_BLOCK % block


def pieces(message: Tensor, block: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, elements of a block): whole blocks, as many as are good to work on at once, and the rest."""
    whole = len(message) - len(message) % block
    most = piece_length(block) * (1 if message.device.type == "cpu" else PIECES_ON_DEVICE)
    for start in range(0, whole, most):
        yield start, min(start + most, whole), block
    if whole < len(message):
        yield whole, len(message), len(message) - whole
