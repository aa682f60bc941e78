# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, import-not-found"
"""Triton kernels of the operators of `fused`, by the same names: each reads and writes its tensors once.

They compute in float32, every product and every sum rounded as torch's are (`enable_fp_fusion` is off), so that they
give the bits of torch's operations. Each function returns whether a kernel served its arguments."""

from collections.abc import Sequence
from typing import TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_decentral.shared.compute.codec import blocks
from lightning_decentral.shared.compute.fused import FACTOR

T = TypeVar("T")
TYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK = 1024
NEIGHBOURS = 4  # largest number of neighbours that one launch receives from; for more, torch's operations are as good
PARTS = 1024  # number of partial maxima that a second kernel combines
HEADERS = 32  # largest number of headers that one program judges
LARGEST_BLOCK = 4096  # largest block of a codec: elements that share a scale, which one program holds
TILE = 2048  # elements that one program decodes, in blocks


@triton.jit
def _difference(sent, h0, h1, h2, h3, sane, w0, w1, w2, w3, at, mask, COUNT: tl.constexpr):
    s = tl.load(sent + at, mask=mask).to(tl.float32)
    total = tl.where(tl.load(sane + 1) != 0, tl.load(h0 + at, mask=mask).to(tl.float32) - s, 0.0) * w0  # sane[0]: own
    if COUNT > 1:
        total += tl.where(tl.load(sane + 2) != 0, tl.load(h1 + at, mask=mask).to(tl.float32) - s, 0.0) * w1
    if COUNT > 2:
        total += tl.where(tl.load(sane + 3) != 0, tl.load(h2 + at, mask=mask).to(tl.float32) - s, 0.0) * w2
    if COUNT > 3:
        total += tl.where(tl.load(sane + 4) != 0, tl.load(h3 + at, mask=mask).to(tl.float32) - s, 0.0) * w3
    return total


@triton.jit
def correct_kernel(x, sent, h0, h1, h2, h3, sane, w0, w1, w2, w3, rate, n, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    difference = _difference(sent, h0, h1, h2, h3, sane, w0, w1, w2, w3, at, mask, COUNT)
    tl.store(x + at, tl.load(x + at, mask=mask).to(tl.float32) + difference * rate, mask=mask)


@triton.jit
def difference_kernel(out, sent, h0, h1, h2, h3, sane, w0, w1, w2, w3, n, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    tl.store(out + at, _difference(sent, h0, h1, h2, h3, sane, w0, w1, w2, w3, at, mask, COUNT), mask=mask)


@triton.jit
def _magnitude(values):
    magnitude = tl.abs(values)
    return tl.where(magnitude == magnitude, magnitude, float("inf"))  # NaN, which a maximum may lose


@triton.jit
def copy_kernel(out, message, parts, n, BLOCK: tl.constexpr):
    largest = tl.zeros([BLOCK], tl.float32)
    start = tl.program_id(0).to(tl.int64) * BLOCK  # 64 bits: a model may have more than 2^31 elements
    while start < n:
        at = start + tl.arange(0, BLOCK)
        values = tl.load(message + at, mask=at < n, other=0.0)
        tl.store(out + at, values, mask=at < n)
        largest = tl.maximum(largest, _magnitude(values.to(tl.float32)))
        start += tl.num_programs(0) * BLOCK  # this program's next block
    tl.store(parts + tl.program_id(0), tl.max(largest, 0))


@triton.jit
def correct_and_copy_kernel(
    out, parts, x, sent, h0, h1, h2, h3, sane, w0, w1, w2, w3, rate, n, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    largest = tl.zeros([BLOCK], tl.float32)
    start = tl.program_id(0).to(tl.int64) * BLOCK  # 64 bits: a model may have more than 2^31 elements
    while start < n:
        at = start + tl.arange(0, BLOCK)
        mask = at < n
        difference = _difference(sent, h0, h1, h2, h3, sane, w0, w1, w2, w3, at, mask, COUNT)
        values = (tl.load(x + at, mask=mask).to(tl.float32) + difference * rate).to(x.dtype.element_ty)
        tl.store(x + at, values, mask=mask)
        tl.store(out + at, values, mask=mask)
        largest = tl.maximum(largest, tl.where(mask, _magnitude(values.to(tl.float32)), 0.0))
        start += tl.num_programs(0) * BLOCK  # this program's next block
    tl.store(parts + tl.program_id(0), tl.max(largest, 0))


@triton.jit(do_not_specialize=["step", "elements", "count"])
def header_kernel(header, parts, step, elements, count, PARTS: tl.constexpr):
    at = tl.arange(0, PARTS)
    largest = tl.max(tl.load(parts + at, mask=at < count, other=0.0), 0)
    tl.store(header, step.to(tl.int64))
    tl.store(header + 1, elements.to(tl.int64))
    tl.store(header + 2, largest.to(tl.float64).to(tl.int64, bitcast=True))  # bits, as `health.stated`'s


@triton.jit
def judge_kernel(sane, headers, count, MOST: tl.constexpr, FACTOR: tl.constexpr, HEADERS: tl.constexpr):
    at = tl.arange(0, HEADERS)
    bits = tl.load(headers + 3 * at + 2, mask=at < count, other=0)  # (step, elements, scale) of each
    scales = tl.where(at < count, bits.to(tl.float64, bitcast=True), float("inf"))
    known = tl.where(scales == scales, scales, float("inf"))
    # The rank of each, equal ones in order; of what is finite, the lower median.
    one, other = tl.expand_dims(known, 1), tl.expand_dims(known, 0)
    before = (other < one) | ((other == one) & (tl.expand_dims(at, 0) < tl.expand_dims(at, 1)))
    rank = tl.sum(before.to(tl.int32), 1)
    finite = tl.sum((known < float("inf")).to(tl.int32), 0)
    median = tl.sum(tl.where(rank == tl.maximum(finite - 1, 0) // 2, known, 0.0), 0)
    limit = tl.minimum(tl.maximum(median, 1.0), MOST) * FACTOR
    tl.store(sane + at, known <= limit, mask=at < count)


@triton.jit
def _start(piece, key):
    x = piece.to(tl.uint32) * 0x9E3779B9 + key
    x = (x ^ (x >> 16)) * 0x7FEB352D  # "lowbias32", as `blocks._hashed`
    x = (x ^ (x >> 15)) * 0x846CA68B
    return ((x ^ (x >> 16)) & 0xFFFF).to(tl.int32)


@triton.jit(do_not_specialize=["key"])
def encode_kernel(
    message, quantized, scales, midpoints, n, key, columns, piece, COLUMNS: tl.constexpr, REPLACE: tl.constexpr
):
    inside = tl.arange(0, COLUMNS)
    at = tl.program_id(0).to(tl.int64) * columns + inside
    mask = (inside < columns) & (at < n)
    x = tl.load(message + at, mask=mask, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(_magnitude(x), 0), 127.0), 1.2e-38)  # a block of zeros, too, has a scale
    tl.store(scales + tl.program_id(0), scale)
    noise = tl.load(midpoints + _start(at // piece, key.to(tl.uint32)) + at % piece, mask=mask, other=0.0)
    scaled = noise + x * tl.div_rn(1.0, scale)
    rounded = tl.minimum((scaled + 12582912.0) - 12582912.0, 127.0)  # 1.5 * 2^23: half to even
    tl.store(quantized + at, rounded.to(tl.int8), mask=mask)
    if REPLACE:
        tl.store(message + at, rounded * scale, mask=mask)


@triton.jit
def decode_kernel(out, quantized, scales, n, columns, count, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = tl.arange(0, COLUMNS)[None, :]
    at = block[:, None] * columns + inside
    mask = (inside < columns) & (at < n)
    values = tl.load(quantized + at, mask=mask, other=0).to(tl.float32)
    tl.store(out + at, values * tl.load(scales + block, mask=block < count, other=0.0)[:, None], mask=mask)


# ---- the operations --------------------------------------------------------------------------------------------------


def correct_(
    x: Tensor, sent: Tensor, received: Sequence[Tensor], weights: Sequence[float], sane: Tensor, rate: float
) -> bool:
    if len(received) > NEIGHBOURS or x.dtype not in TYPES:
        return False
    given = sent, *_four(received), sane, *_four(weights)
    grid = (triton.cdiv(x.numel(), BLOCK),)
    correct_kernel[grid](x, *given, rate, x.numel(), len(received), BLOCK, enable_fp_fusion=False)
    return True


def correct_and_state_(
    out: Tensor,
    header: Tensor,
    x: Tensor,
    sent: Tensor,
    received: Sequence[Tensor],
    weights: Sequence[float],
    sane: Tensor,
    rate: float,
    step: int,
    elements: int,
) -> bool:
    if len(received) > NEIGHBOURS or x.dtype not in TYPES:
        return False
    programs = min(triton.cdiv(x.numel(), BLOCK), PARTS)  # the second kernel reads all parts at once
    parts = torch.empty(programs, dtype=torch.float32, device=x.device)
    given = sent, *_four(received), sane, *_four(weights)
    correct_and_copy_kernel[(programs,)](
        out, parts, x, *given, rate, x.numel(), len(received), BLOCK, enable_fp_fusion=False
    )
    header_kernel[(1,)](header, parts, step, elements, programs, PARTS)
    return True


def difference_(out: Tensor, sent: Tensor, received: Sequence[Tensor], weights: Sequence[float], sane: Tensor) -> bool:
    if len(received) > NEIGHBOURS or out.dtype != torch.float32:
        return False
    given = sent, *_four(received), sane, *_four(weights)
    grid = (triton.cdiv(out.numel(), BLOCK),)
    difference_kernel[grid](out, *given, out.numel(), len(received), BLOCK, enable_fp_fusion=False)
    return True


def state_(out: Tensor, header: Tensor, message: Tensor, step: int, elements: int) -> bool:
    if message.dtype not in TYPES:
        return False
    programs = min(triton.cdiv(message.numel(), BLOCK), PARTS)
    parts = torch.empty(programs, dtype=torch.float32, device=message.device)
    copy_kernel[(programs,)](out, message, parts, message.numel(), BLOCK)
    header_kernel[(1,)](header, parts, step, elements, programs, PARTS)
    return True


def judge_(sane: Tensor, headers: Tensor) -> bool:
    if len(headers) > HEADERS:
        return False
    judge_kernel[(1,)](sane, headers, len(headers), torch.finfo(torch.float64).max / FACTOR / 2, FACTOR, HEADERS)
    return True


def int8_encode_(quantized: Tensor, scales: Tensor, message: Tensor, block: int, key: int, replace: bool) -> bool:
    if block > LARGEST_BLOCK or message.dtype not in TYPES:
        return False
    columns = triton.next_power_of_2(block)  # a program's arrays have such sizes
    encode_kernel[(len(scales),)](
        *(message, quantized, scales, blocks.midpoints(message.device), message.numel(), key & 0x7FFFFFFF),
        *(block, blocks.MIDPOINTS - blocks.MIDPOINTS % block, columns, replace),
        num_warps=max(1, min(4, columns // 256)),
        enable_fp_fusion=False,
    )
    return True


def int8_decode_(out: Tensor, quantized: Tensor, scales: Tensor, block: int) -> bool:
    if block > LARGEST_BLOCK or out.dtype not in TYPES:
        return False
    columns = triton.next_power_of_2(block)  # a program's arrays have such sizes
    rows = max(1, TILE // columns)  # blocks of one program
    given = out, quantized, scales, out.numel(), block, len(scales)
    decode_kernel[(triton.cdiv(len(scales), rows),)](*given, rows, columns)
    return True


def try_out(device: torch.device) -> None:
    """Compile one kernel and check its result. RuntimeError: the result is wrong."""
    x, one, sane = torch.zeros(8, device=device), torch.ones(8, device=device), torch.ones(2, device=device) > 0
    correct_(x, one, [one + one], [0.5], sane, 1.0)
    if not torch.equal(x, one / 2):
        raise RuntimeError(f"a kernel computed 0 + (2 - 1) / 2 as {x[0]}")


def _four(given: Sequence[T]) -> list[T]:
    return [*given, *[given[0]] * (NEIGHBOURS - len(given))]  # padding rows are never read
