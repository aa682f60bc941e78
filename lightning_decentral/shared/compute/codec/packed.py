"""Quantization to fewer than eight bits, several numbers in a byte: `Int4`, `Int2`, for differences and gradients."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import ClassVar

import torch
from torch import Tensor

from lightning_decentral.shared.compute.codec.codec import Codec, Frame, Payload, PayloadPart
from lightning_decentral.shared.compute.codec.counter_rng import dither
from lightning_decentral.shared.compute.codec.quantize import check_block, divisor, piece_length, pieces, scratch
from lightning_decentral.shared.plan.arguments import checked


@dataclass(frozen=True, kw_only=True)
class Packed(Codec):
    """code = floor(message / scale + middle + u), u uniform on (0, 1);  decoded = (code - middle) scale;
    scale = max |message| / largest of a block.

    Unbiased: the mean of decoded over u is the message; |error| < scale. A block of b numbers has s = ceil(b bits / 8)
    bytes; number i stands in byte i mod s, from bit (i div s) bits on. A block with NaN or infinity decodes to such
    numbers.
    """

    complete = False
    bits: ClassVar[int]
    largest: ClassVar[float]
    middle: ClassVar[float]
    block: int = 128

    def __post_init__(self) -> None:
        check_block(self.block, "128 is usual")

    def parts(self, length: int, dtype: torch.dtype) -> tuple[PayloadPart, ...]:
        whole, rest = divmod(length, self.block)
        packed = whole * self._stride(self.block) + self._stride(rest)
        return PayloadPart(packed, torch.uint8), PayloadPart(ceil(length / self.block), torch.float32)

    def _stride(self, numbers: int) -> int:
        """Bytes of a block."""
        return ceil(numbers * self.bits / 8)

    def encode(self, message: Tensor, payload: Payload, frame: Frame) -> None:
        for _ in self._encoded(message, payload, frame):
            pass

    def replace(self, message: Tensor, payload: Payload, frame: Frame) -> None:
        for rows, codes, scale in self._encoded(message, payload, frame):
            rows.copy_(codes.sub_(self.middle).mul_(scale))  # while the codes are in the cache

    def residual(self, message: Tensor, payload: Payload, frame: Frame) -> None:
        for rows, codes, scale in self._encoded(message, payload, frame):
            rows.sub_(codes.sub_(self.middle).mul_(scale).to(rows.dtype))

    def _encoded(self, message: Tensor, payload: Payload, frame: Frame) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(rows of the message, codes, scale) of pieces that have been encoded."""
        exact = torch.promote_types(message.dtype, torch.float32)
        noise = dither(message.numel(), frame.key, piece_length(self.block), message.device)
        largest = divisor(self.largest, message.device)
        for start, stop, columns in pieces(message, self.block):
            rows = message[start:stop].view(-1, columns)
            x, (packed, scale) = rows.to(exact), self._places(payload, start, rows.shape[0], columns)
            # NaN and infinity go into the scale, so receivers see them; a block of zeros, too, has one.
            scale.copy_(torch.maximum(x.amax(1), x.amin(1).neg_())).div_(largest).clamp_(min=1.2e-38)
            shared = scale.to(exact).unsqueeze(1)
            codes = noise(start, stop, scratch(stop - start, exact, message.device)).view_as(x)
            # floor(s + u) = round(s + u - 1/2)
            codes.addcmul_(x, shared.reciprocal()).add_(self.middle).round_().clamp_(0, 2**self.bits - 1)
            self._pack(codes, packed)
            yield rows, codes, shared

    def _places(self, payload: Payload, start: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """(bytes [rows, stride], scales [rows]) of a piece."""
        block, stride = start // self.block, self._stride(columns)
        at = block * self._stride(self.block)
        return payload[0][at : at + rows * stride].view(rows, stride), payload[1][block : block + rows]

    def _pack(self, codes: Tensor, packed: Tensor) -> None:
        # Sums of whole numbers under 256: exact, and faster than shifting bytes.
        stride = packed.shape[1]
        sums = codes[:, :stride].clone()
        for part in range(1, 8 // self.bits):
            numbers = codes[:, part * stride : (part + 1) * stride]
            sums[:, : numbers.shape[1]].add_(numbers, alpha=2 ** (part * self.bits))
        packed.copy_(sums)

    def decode(self, payload: Payload, out: Tensor, frame: Frame) -> None:
        exact = torch.promote_types(out.dtype, torch.float32)
        for start, stop, columns in pieces(out, self.block):
            rows = out[start:stop].view(-1, columns)
            packed, scale = self._places(payload, start, rows.shape[0], columns)
            values = rows if out.dtype == exact else torch.empty_like(rows, dtype=exact)
            for part in range(8 // self.bits):
                numbers = values[:, part * packed.shape[1] : (part + 1) * packed.shape[1]]
                codes = (packed >> (part * self.bits)).bitwise_and_(2**self.bits - 1)
                numbers.copy_(codes[:, : numbers.shape[1]])
            values.sub_(self.middle).mul_(scale.to(exact).unsqueeze(1))
            if values is not rows:
                rows.copy_(values)


@checked
@dataclass(frozen=True, kw_only=True)
class Int4(Packed):
    """Numbers -7 .. 7 times a scale of their block, rounded at random: `Packed`. For gradients, or wrapped.

    Bytes: n / 2 + 4 n / block, 7.5 times fewer than float32 with blocks of 128. By itself it would leave gossiping
    workers different by a tenth of their weights, so there it codes differences: wrap it.

    Args:
        block: elements that share a scale.

    Raises:
        ValueError: block is not in 1 .. 65536.

    Source: as `Int8`; the codes of 4 bits, Dettmers et al. 2305.14314.
    """

    bits = 4
    largest, middle = 7.0, 8.0  # zero is zero


@checked
@dataclass(frozen=True, kw_only=True)
class Int2(Packed):
    """Numbers -1.5, -0.5, 0.5, 1.5 times a scale of their block, rounded at random: `Packed`. For gradients or wrapped.

    Bytes: n / 4 + 4 n / block, 14.2 times fewer than float32 with blocks of 128. Three fifths of a normal
    message's square are lost; of parameters it codes differences: wrap it, at a smaller rate.

    Args:
        block: elements that share a scale.

    Raises:
        ValueError: block is not in 1 .. 65536.

    Source: as `Int8`.
    """

    bits = 2
    largest, middle = 1.5, 1.5  # with a zero there were three numbers only, and more lost than sent
