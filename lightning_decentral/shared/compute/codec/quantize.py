"""Quantization: `Int8`, rounded at random (the codec to copy); smaller float types; messages as they are."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import ClassVar

import torch
from torch import Tensor

from lightning_decentral.shared.compute.codec.codec import Codec, Frame, Payload, PayloadPart
from lightning_decentral.shared.compute.codec.counter_rng import dither
from lightning_decentral.shared.compute.fused import operator
from lightning_decentral.shared.plan.arguments import checked


@checked
@dataclass(frozen=True, kw_only=True)
class Int8(Codec):
    """decoded = q scale;  scale = max |message| / 127 of a block;  q = floor(message / scale + u), u uniform on (0, 1).

    Unbiased: the mean of decoded over u is the message; |error| < scale. Bytes: n + 4 ceil(n / block), that is
    4 / (1 + 4 / block) times fewer than float32: 3.94 with blocks of 256. A block with NaN or infinity decodes to such
    numbers.

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

    def encode(self, message: Tensor, payload: Payload, frame: Frame) -> None:
        self._encode(message, payload, frame, False)

    def replace(self, message: Tensor, payload: Payload, frame: Frame) -> None:
        self._encode(message, payload, frame, True)

    def residual(self, message: Tensor, payload: Payload, frame: Frame) -> None:
        if message.device.type == "cuda":
            super().residual(message, payload, frame)
            return
        quantized, scales = payload
        for rows, codes, scale in _encoded(quantized, scales, message, self.block, frame.key):
            rows.sub_(codes.mul_(scale).to(rows.dtype))  # while the codes are in the cache

    def _encode(self, message: Tensor, payload: Payload, frame: Frame, replace: bool) -> None:
        quantized, scales = payload
        encode = int8_encode_ if message.device.type == "cuda" else _encode
        encode(quantized, scales, message, self.block, frame.key, replace)

    def decode(self, payload: Payload, out: Tensor, frame: Frame) -> None:
        quantized, scales = payload
        decode = int8_decode_ if out.device.type == "cuda" else _decode
        decode(out, quantized, scales, self.block)


def _encoded(
    quantized: Tensor, scales: Tensor, message: Tensor, block: int, key: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(rows of the message, their codes as numbers, scale) of pieces that have been encoded."""
    exact = torch.promote_types(message.dtype, torch.float32)
    # A function of rank, round, bucket and place: there is no generator to save.
    noise = dither(message.numel(), key, piece_length(block), message.device)
    largest = divisor(127, message.device)
    for start, stop, columns in pieces(message, block):
        rows = message[start:stop].view(-1, columns)
        x = rows.to(exact)
        scale = scales[start // block :][: x.shape[0]]
        # NaN and infinity go into the scale, so receivers see them.
        scale.copy_(torch.maximum(x.amax(1), x.amin(1).neg_())).div_(largest)
        scale.clamp_(min=1.2e-38)  # a block of zeros, too, has a scale
        shared = scale.to(exact).unsqueeze(1)
        rounded = noise(start, stop, scratch(stop - start, exact, message.device)).view_as(x)
        # floor(s + u) = round(s + u - 1/2)
        rounded.addcmul_(x, shared.reciprocal()).round_().clamp_(max=127)
        quantized[start:stop].copy_(rounded.view(-1))
        yield rows, rounded, shared


def _encode(quantized: Tensor, scales: Tensor, message: Tensor, block: int, key: int, replace: bool) -> None:
    for rows, rounded, shared in _encoded(quantized, scales, message, block, key):
        if replace:
            # While q is in the cache. A zero may have a sign that its receivers' has not.
            torch.mul(rounded, shared, out=rows)


def _decode(out: Tensor, quantized: Tensor, scales: Tensor, block: int) -> None:
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


LARGEST_BLOCK = 2**16
PIECES, PIECES_ON_DEVICE = 4, 64
"""Worked on at once. A host's operations on one take about as long as Python does to ask for them, and 1 MB still is in
its cache. A launch costs a device more than memory that is no cache."""


def check_block(block: int, remedy: str) -> None:
    """ValueError unless it is in 1 .. 65536."""
    if not 1 <= block <= LARGEST_BLOCK:
        raise ValueError(f"a codec's block must be in 1 .. {LARGEST_BLOCK}, got {block}: {remedy}")


def piece_length(block: int) -> int:
    """Elements of as many whole blocks as have one place in the table of noise."""
    return LARGEST_BLOCK - LARGEST_BLOCK % block


class _Scratch(threading.local):
    """Reused memory of each thread, by dtype."""

    def __init__(self) -> None:
        self.held: dict[torch.dtype, Tensor] = {}


_here = _Scratch()


def scratch(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory until this thread asks again: on a host fresh pages cost more than the work."""
    if device.type != "cpu":
        return torch.empty(elements, dtype=dtype, device=device)
    held = _here.held.get(dtype)
    if held is None or held.numel() < elements:
        held = _here.held[dtype] = torch.empty(elements, dtype=dtype, device=device)
    return held[:elements]


def divisor(number: float, device: torch.device) -> Tensor:
    """Divisor as a tensor: a host divides by it, but CUDA multiplies by a number's reciprocal and rounds otherwise."""
    return torch.full((), number, dtype=torch.float32, device=device)


def pieces(message: Tensor, block: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, elements of a block): whole blocks, as many as are good to work on at once, and the rest."""
    length = message.numel()
    whole = length - length % block
    most = piece_length(block) * (PIECES if message.device.type == "cpu" else PIECES_ON_DEVICE)
    for start in range(0, whole, most):
        yield start, min(start + most, whole), block
    if whole < length:
        yield whole, length, length - whole
