"""Quantization with stochastic rounding: `Int8` (the codec to copy); `Int4` and `Int2`, several numbers in a byte."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import ClassVar

import torch
from torch import Tensor

from lightning_decentral.shared.compute.codec.blocks import check_block, dither, divisor, piece_length, pieces, scratch
from lightning_decentral.shared.compute.codec.codec import BFloat16 as BFloat16  # names in pickles of version 0.2.0
from lightning_decentral.shared.compute.codec.codec import Codec, Frame, Payload, PayloadPart
from lightning_decentral.shared.compute.codec.codec import Float16 as Float16
from lightning_decentral.shared.compute.codec.codec import Float32 as Float32
from lightning_decentral.shared.compute.codec.codec import Plain as Plain
from lightning_decentral.shared.compute.fused import operator
from lightning_decentral.shared.plan.arguments import checked


@checked
@dataclass(frozen=True, kw_only=True)
class Int8(Codec):
    """decoded = q scale;  scale = max |message| / 127 of a block;  q = floor(message / scale + u), u uniform on (0, 1).

    Unbiased: the mean of decoded over u is the message; |error| < scale. Bytes: n + 4 ceil(n / block), that is
    4 / (1 + 4 / block) times fewer than float32: 3.94 with blocks of 256. A block with NaN or infinity decodes to NaN
    or infinity.

    Args:
        block: elements that share a scale.

    Raises:
        ValueError: block is not in 1 .. 65536.

    Source: blockwise scales, Dettmers et al. 2110.02861; stochastic rounding, Alistarh et al. 1610.02132 (QSGD).
    """

    block: int = 256

    def __post_init__(self) -> None:
        check_block(self.block, "256 makes messages 3.94 times smaller than float32")

    def parts(self, length: int, dtype: torch.dtype) -> tuple[PayloadPart, ...]:
        return PayloadPart(length, torch.int8), PayloadPart(ceil(length / self.block), torch.float32)

    def encode(self, message: Tensor, payload: Payload, frame: Frame, replace: bool = False) -> None:
        quantized, scales = payload
        encode = int8_encode_ if message.device.type == "cuda" else _encode
        encode(quantized, scales, message, self.block, frame.key, replace)

    def replace(self, message: Tensor, payload: Payload, frame: Frame) -> None:
        self.encode(message, payload, frame, replace=True)

    def residual(self, message: Tensor, payload: Payload, frame: Frame) -> None:
        if message.device.type == "cuda":
            super().residual(message, payload, frame)
        else:
            quantized, scales = payload
            _encode(quantized, scales, message, self.block, frame.key, False, residual=True)

    def decode(self, payload: Payload, out: Tensor, frame: Frame) -> None:
        quantized, scales = payload
        decode = int8_decode_ if out.device.type == "cuda" else _decode
        decode(out, quantized, scales, self.block)


def _encode(
    quantized: Tensor,  # int8 (elements,)
    scales: Tensor,  # float32 (blocks,)
    message: Tensor,  # (elements,)
    block: int,
    key: int,
    replace: bool,
    residual: bool = False,
) -> None:
    """Encode the message; overwrite it by what is decoded (`replace`), or by the encoding error (`residual`)."""
    for start, rows, scale, codes in _scaled(message, scales, block, key, 127):
        codes.round_().clamp_(max=127)  # floor(s + u) = round(s + u - 1/2); at least floor(-127 + u) = -127
        quantized[start : start + rows.numel()].copy_(codes.view(-1))
        # While q is in the cache. A zero may have another sign here than at the receivers.
        if replace:
            torch.mul(codes, scale, out=rows)
        elif residual:
            rows.sub_(codes.mul_(scale).to(rows.dtype))


def _scaled(
    message: Tensor,  # (elements,)
    scales: Tensor,  # float32 (blocks,), filled
    block: int,
    key: int,
    largest: float,
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Yield (start, x, scale, x / scale + u - 1/2) of each piece, x [blocks, columns] and scale [blocks, 1]."""
    exact = torch.promote_types(message.dtype, torch.float32)  # half precision is computed in float32
    # The noise is a function of rank, round, bucket and index: there is no generator to save.
    noise = dither(message.numel(), key, piece_length(block), message.device)
    unit = divisor(largest, message.device)
    for start, stop, columns in pieces(message, block):
        rows = message[start:stop].view(-1, columns)
        x = rows.to(exact)
        own = scales[start // block :][: len(rows)]
        # NaN and infinity go into the scale, so receivers see them; a block of zeros, too, has one.
        own.copy_(torch.maximum(x.amax(1), x.amin(1).neg_())).div_(unit).clamp_(min=1.2e-38)
        scale = own.to(exact).unsqueeze(1)
        u = noise(start, stop, scratch(stop - start, exact, message.device)).view_as(x)
        yield start, rows, scale, u.addcmul_(x, scale.reciprocal())


def _decode(
    out: Tensor,  # (elements,)
    quantized: Tensor,  # int8 (elements,)
    scales: Tensor,  # float32 (blocks,)
    block: int,
) -> None:
    for start, stop, columns in pieces(out, block):
        scale = scales[start // block :][: (stop - start) // columns].unsqueeze(1)
        rows, exact = out[start:stop].view(-1, columns), torch.promote_types(out.dtype, torch.float32)
        codes = quantized[start:stop].view(-1, columns)
        if out.dtype == exact:  # a product of two types would take memory for the codes as numbers
            rows.copy_(codes).mul_(scale.to(exact))
        else:  # half precision is computed in float32 and rounded once
            torch.mul(codes, scale.to(exact), out=rows)


int8_encode_ = operator(
    "int8_encode_(Tensor(a!) quantized, Tensor(b!) scales, Tensor(c!) message, int block, int key, bool replace) -> ()",
    _encode,
)
int8_decode_ = operator("int8_decode_(Tensor(a!) out, Tensor quantized, Tensor scales, int block) -> ()", _decode)


@dataclass(frozen=True, kw_only=True)
class Packed(Codec):
    """code = floor(message / scale + middle + u), u uniform on (0, 1);  decoded = (code - middle) scale;
    scale = max |message| / largest of a block.

    Unbiased: the mean of decoded over u is the message; |error| < scale. A block of b numbers has s = ceil(b bits / 8)
    bytes; number i stands in byte i mod s, from bit (i div s) bits on. A block with NaN or infinity decodes to NaN or
    infinity."""

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
        """Return the bytes of the codes of a block of so many numbers."""
        return ceil(numbers * self.bits / 8)

    def encode(
        self, message: Tensor, payload: Payload, frame: Frame, replace: bool = False, residual: bool = False
    ) -> None:
        for start, rows, scale, codes in _scaled(message, payload[1], self.block, frame.key, self.largest):
            # floor(s + u) = round(s + u - 1/2)
            codes.add_(self.middle).round_().clamp_(0, 2**self.bits - 1)
            packed, _ = self._places(payload, start, *rows.shape)
            # Sums of whole numbers under 256: exact, and faster than shifting bytes.
            stride = packed.shape[1]
            sums = codes[:, :stride].clone()
            for part in range(1, 8 // self.bits):
                numbers = codes[:, part * stride : (part + 1) * stride]
                sums[:, : numbers.shape[1]].add_(numbers, alpha=2 ** (part * self.bits))
            packed.copy_(sums)
            if replace:  # while the codes are in the cache
                rows.copy_(codes.sub_(self.middle).mul_(scale))
            elif residual:
                rows.sub_(codes.sub_(self.middle).mul_(scale).to(rows.dtype))

    def replace(self, message: Tensor, payload: Payload, frame: Frame) -> None:
        self.encode(message, payload, frame, replace=True)

    def residual(self, message: Tensor, payload: Payload, frame: Frame) -> None:
        self.encode(message, payload, frame, residual=True)

    def _places(self, payload: Payload, start: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """(bytes [rows, stride], scales [rows]) of a piece."""
        block, stride = start // self.block, self._stride(columns)
        at = block * self._stride(self.block)
        return payload[0][at : at + rows * stride].view(rows, stride), payload[1][block : block + rows]

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
    """Quantizes to numbers -7 .. 7 times a scale of their block, with stochastic rounding: `Packed`.

    Bytes: n / 2 + 4 n / block, 7.5 times fewer than float32 with blocks of 128. Gradients may be encoded as they are.
    Gossiping workers would differ by a tenth of their parameters: wrap it, `DifferenceCompression(Int4())`.

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
    """Quantizes to numbers -1.5, -0.5, 0.5, 1.5 times a scale of their block, with stochastic rounding: `Packed`.

    Bytes: n / 4 + 4 n / block, 14.2 times fewer than float32 with blocks of 128. Three fifths of a normal message's
    square are lost. For parameters wrap it, `DifferenceCompression(Int2())`, at a smaller mixing rate.

    Args:
        block: elements that share a scale.

    Raises:
        ValueError: block is not in 1 .. 65536.

    Source: as `Int8`.
    """

    bits = 2
    largest, middle = 1.5, 1.5  # with a code for zero only three numbers: the error would exceed the message
