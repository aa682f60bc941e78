"""What can travel: types, small integers, the largest elements, low rank, differences (`coding`: what a codec is)."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import ClassVar

import torch
from torch import Tensor

from lightning_decentral.gossip.coding import Codec, Frame, Layout, Part, Payload
from lightning_decentral.gossip.int8 import Int8 as Int8
from lightning_decentral.gossip.low_rank import factors, orthonormal
from lightning_decentral.gossip.noise import uniform
from lightning_decentral.gossip.pieces import LARGEST_BLOCK, check_block, pieces
from lightning_decentral.gossip.power_gossip import PowerGossip as PowerGossip


class _Copied(Codec):
    """A copy of the message in some type."""

    def encode(self, message: Tensor, payload: Payload, frame: Frame) -> None:
        """A copy, rounded to the payload's type."""
        payload[0].copy_(message)

    def decode(self, payload: Payload, out: Tensor, frame: Frame) -> None:
        """A copy."""
        out.copy_(payload[0])


@dataclass(frozen=True)
class Plain(_Copied):
    """decoded = message, in its own type, whatever that is; nothing is copied. Bytes: n * itemsize."""

    def parts(self, layout: Layout, dtype: torch.dtype) -> tuple[Part, ...]:
        """The message."""
        return (Part(layout.length, dtype),)

    checked_parts = parts


class _Cast(_Copied):
    """decoded = round(message), to the nearest value of a type; a message of a type as small is sent as it is."""

    narrow: ClassVar[torch.dtype]

    def parts(self, layout: Layout, dtype: torch.dtype) -> tuple[Part, ...]:
        """The message in the smaller type."""
        return (Part(layout.length, self.narrow if self.narrow.itemsize < dtype.itemsize else dtype),)


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

    Beyond 65504 it is infinite, which hearers refuse and the sender raises.
    """

    narrow = torch.float16


@dataclass(frozen=True, kw_only=True)
class TopK(Codec):
    """decoded = message where |message| is among the largest of its block, 0 elsewhere.

    Bytes, k = ceil(fraction block) of each block: k (itemsize + 2), the value and its place in the block; for float32
    6 fraction n. A small element of a message would never arrive, so this codes differences: wrap it.

    Args:
        fraction: of the elements, in (0, 1].
        block: elements among which the largest are sought.

    Raises:
        ValueError: fraction is not in (0, 1], block not in 1 .. 65536.

    Source: Stich et al. 1809.07599.
    """

    complete = False
    fraction: float = 0.1
    block: int = 4096

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"TopK's fraction must be in (0, 1], got {self.fraction}: 0.1 sends every tenth element")
        check_block(self.block, "4096 is fast to search")

    def parts(self, layout: Layout, dtype: torch.dtype) -> tuple[Part, ...]:
        """(values, places as pairs of bytes)."""
        whole, rest = divmod(layout.length, self.block)
        kept = whole * self._kept(self.block) + (self._kept(rest) if rest else 0)
        return Part(kept, dtype), Part(2 * kept, torch.uint8)

    def _kept(self, block: int) -> int:
        return ceil(self.fraction * block)

    def encode(self, message: Tensor, payload: Payload, frame: Frame) -> None:
        """The largest of each block; NaN counts as largest."""
        for start, stop, (values, places) in self._blocks(message, payload):
            rows = message[start:stop].view(len(values), -1)
            largest = rows.abs().topk(values.shape[1], dim=1, sorted=False).indices
            torch.gather(rows, 1, largest, out=values)
            places.copy_(largest - LARGEST_BLOCK // 2)

    def decode(self, payload: Payload, out: Tensor, frame: Frame) -> None:
        """Zero but for what was sent."""
        out.zero_()
        for start, stop, (values, places) in self._blocks(out, payload):
            out[start:stop].view(len(values), -1).scatter_(1, places.long() + LARGEST_BLOCK // 2, values)

    def _blocks(self, message: Tensor, payload: Payload) -> Iterator[tuple[int, int, tuple[Tensor, Tensor]]]:
        """(start, stop, (values, places) [blocks, kept]) of pieces."""
        values, places = payload[0], payload[1].view(torch.int16)
        at = 0
        for start, stop, columns in pieces(message, self.block):
            kept = self._kept(columns)
            end = at + (stop - start) // columns * kept
            yield start, stop, (values[at:end].view(-1, kept), places[at:end].view(-1, kept))
            at = end


@dataclass(frozen=True, kw_only=True)
class LowRank(Codec):
    """decoded = P P^T M for each matrix M [m, c] of the message;  P [m, rank] = orthonormal(M S), S [c, rank] random.

    Sent are P and P^T M: rank (m + c) elements for m c. Vectors, and matrices that are no larger than that, are sent as
    they are. Of a message only part arrives, so this codes differences: wrap it. PowerGossip (2008.01425) has the two
    ends of a link iterate on the difference of their matrices; here the difference is that from what the hearer knows
    already, which needs no answer from it, so directed graphs are served, too.

    Args:
        rank: columns of P.

    Raises:
        ValueError: rank is below 1.

    Source: one step of subspace iteration as in Vogels et al. 1905.13727 (PowerSGD), without its warm start: what was
    just sent is missing from the difference, so the next one wants other directions.
    """

    complete = False
    rank: int = 4

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"LowRank's rank must be at least 1, got {self.rank}: 1 to 8 are usual")

    def parts(self, layout: Layout, dtype: torch.dtype) -> tuple[Part, ...]:
        """One tensor: P and P^T M of each matrix, then the rest."""
        return (Part(factors(layout, self.rank).elements, dtype),)

    def encode(self, message: Tensor, payload: Payload, frame: Frame) -> None:
        """Two products with each matrix, and the orthonormal columns, at least in float32."""
        plan = factors(frame.layout, self.rank)
        for place, (matrix, left, right) in enumerate(plan.views(message, payload[0])):
            exact = matrix if matrix.dtype == torch.float64 else matrix.float()
            start = uniform(exact.shape[1], self.rank, frame.key + 31 * place, exact)
            basis = orthonormal(exact @ start)
            left.copy_(basis)
            right.copy_(basis.T @ exact)
        for rest, sent in plan.rest(message, payload[0]):
            sent.copy_(rest)

    def decode(self, payload: Payload, out: Tensor, frame: Frame) -> None:
        """P (P^T M)."""
        plan = factors(frame.layout, self.rank)
        for matrix, left, right in plan.views(out, payload[0]):
            torch.mm(left, right, out=matrix)
        for rest, sent in plan.rest(out, payload[0]):
            rest.copy_(sent)


@dataclass(frozen=True)
class DifferenceCompression(Codec):
    """payload = inner.encode(message - estimate);  decoded = estimate + inner.decode(payload);  estimate <- decoded.

    Both ends of a link keep the estimate, so only what the hearer doesn't know yet is compressed: as the workers
    settle, the error of any contracting codec vanishes. Bytes: the inner codec's.

    Targets that hear a worker in exactly the same steps share one estimate. So on a graph that doesn't change this is
    CHOCO-Gossip, at CHOCO's memory: an estimate of itself, and one of each source. On a graph that changes CHOCO's
    single estimate can't be kept, since a target misses what was sent while it didn't listen; one for each link is
    exact there, at a copy of the parameters for each target and each source of a period (2 log2 n on a hypercube).
    All start at worker 0's parameters.

    Coarse codecs need a smaller rate (`Gossip(rate=...)`), as CHOCO's gamma.

    Raises:
        ValueError: inner remembers by itself.

    Source: Koloskova et al. 1902.00340, algorithm 2, there for one constant W.
    """

    remembers = True
    inner: Codec

    def __post_init__(self) -> None:
        if self.inner.remembers:
            raise ValueError(f"DifferenceCompression's inner codec remembers by itself, got {self.inner}: unwrap it")

    def parts(self, layout: Layout, dtype: torch.dtype) -> tuple[Part, ...]:
        """The inner codec's."""
        return self.inner.parts(layout, dtype)

    def encode(self, message: Tensor, payload: Payload, frame: Frame) -> None:
        """What the hearer lacks."""
        assert frame.estimate is not None
        self.inner.encode(message - frame.estimate, payload, frame)

    def decode(self, payload: Payload, out: Tensor, frame: Frame) -> None:
        """The estimate and what came."""
        assert frame.estimate is not None
        self.inner.decode(payload, out, frame)
        out.add_(frame.estimate)
