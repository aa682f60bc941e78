"""Sparsification (`TopK`: the largest elements) and difference compression (CHOCO: error feedback by estimates)."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from lightning_decentral.shared.compute.codec.blocks import LARGEST_BLOCK, check_block, pieces
from lightning_decentral.shared.compute.codec.codec import Codec, Frame, Payload, PayloadPart
from lightning_decentral.shared.plan.arguments import checked


@checked
@dataclass(frozen=True, kw_only=True)
class TopK(Codec):
    """decoded = message where |message| is among the largest of its block, 0 elsewhere.

    Bytes, k = ceil(fraction block) of each block: k (itemsize + 2), the value and its index in the block; for float32
    6 fraction n. Small elements of a message would never arrive: wrap it, `DifferenceCompression(TopK())`.

    Args:
        fraction: fraction of the elements that are sent, in (0, 1].
        block: elements among which the largest are sought.

    Raises:
        ValueError: fraction is not in (0, 1], block not in 1 .. 65536.

    Source: Stich et al. 1809.07599.
    """

    complete = whole = False
    fraction: float = 0.1
    block: int = 4096

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"TopK's fraction must be in (0, 1], got {self.fraction}: 0.1 sends every tenth element")
        check_block(self.block, "4096 is fast to search")

    def parts(self, length: int, dtype: torch.dtype) -> tuple[PayloadPart, ...]:
        """Return (values, indices in the block as pairs of bytes)."""
        whole, rest = divmod(length, self.block)
        kept = whole * self._kept(self.block) + (self._kept(rest) if rest else 0)  # the last block may be shorter
        # Bytes: neither gloo nor NCCL sends integers of 16 bits.
        return PayloadPart(kept, dtype), PayloadPart(2 * kept, torch.uint8)

    def _kept(self, block: int) -> int:
        return ceil(self.fraction * block)

    def encode(self, message: Tensor, payload: Payload, frame: Frame) -> None:
        for start, stop, (values, places) in self._blocks(message, payload):
            rows = message[start:stop].view(len(values), -1)  # (blocks, elements of a block)
            # NaN counts as largest, so that receivers see it.
            largest = rows.abs().topk(values.shape[1], dim=1, sorted=False).indices  # (blocks, kept)
            torch.gather(rows, 1, largest, out=values)
            # 0 .. 65535 as signed numbers of 16 bits.
            places.copy_(largest - LARGEST_BLOCK // 2)

    def decode(self, payload: Payload, out: Tensor, frame: Frame) -> None:
        out.zero_()
        for start, stop, (values, places) in self._blocks(out, payload):
            out[start:stop].view(len(values), -1).scatter_(1, places.long() + LARGEST_BLOCK // 2, values)

    def _blocks(self, message: Tensor, payload: Payload) -> Iterator[tuple[int, int, tuple[Tensor, Tensor]]]:
        """Yield (start, stop, (values, indices) [blocks, kept]) of each piece of the message."""
        values, places = payload[0], payload[1].view(torch.int16)
        at = 0
        for start, stop, columns in pieces(message, self.block):
            kept = self._kept(columns)
            end = at + (stop - start) // columns * kept
            yield start, stop, (values[at:end].view(-1, kept), places[at:end].view(-1, kept))
            at = end


@checked
@dataclass(frozen=True)
class DifferenceCompression(Codec):
    """payload = inner.encode(message - estimate);  decoded = estimate + inner.decode(payload);  estimate <- decoded.

    Both ends of a link keep the estimate, so only what the receiver doesn't know yet is compressed: as the workers
    converge, the error of any contracting codec vanishes. Bytes: the inner codec's.

    Targets that receive in exactly the same steps share one estimate. So on a constant graph this is CHOCO-Gossip, with
    CHOCO's memory: an estimate of this worker, and one of each source. On a changing graph it is exact, too, and keeps
    a copy of the parameters for each target and each source of a period of the graph (2 log2 n on a hypercube).

    Coarse codecs need a smaller mixing rate (`Gossip(rate=...)`), as CHOCO's gamma.

    Raises:
        ValueError: inner keeps estimates by itself.

    Source: Koloskova et al. 1902.00340, algorithm 2, there for one constant W.
    """

    remembers = True
    inner: Codec

    def __post_init__(self) -> None:
        if self.inner.remembers:
            raise ValueError(f"DifferenceCompression's inner codec keeps estimates, too, got {self.inner}: unwrap it")

    def parts(self, length: int, dtype: torch.dtype) -> tuple[PayloadPart, ...]:
        return self.inner.parts(length, dtype)

    def encode(self, message: Tensor, payload: Payload, frame: Frame) -> None:
        assert frame.estimate is not None
        self.inner.encode(message - frame.estimate, payload, frame)  # a copy: the message stays the sender's

    def replace(self, message: Tensor, payload: Payload, frame: Frame) -> None:
        # In place: no fresh memory for the difference, and it is decoded while it is in the cache.
        assert frame.estimate is not None
        self.inner.replace(message.sub_(frame.estimate), payload, frame)
        message.add_(frame.estimate)

    def decode(self, payload: Payload, out: Tensor, frame: Frame) -> None:
        assert frame.estimate is not None
        self.inner.decode(payload, out, frame)
        out.add_(frame.estimate)
