"""Blocks of a message: pieces to encode at once, scratch memory, and random numbers for stochastic rounding.

Random numbers are a function of (key, index): no state to save, and equal on every device and in the simulation."""

import threading
from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
from torch import Tensor

LARGEST_BLOCK = 2**16
PIECES, PIECES_ON_DEVICE = 4, 64
"""Pieces encoded at once. On a host their arithmetic takes about as long as Python's calls, and 1 MB is still in the
cache. On a device a kernel launch costs more than memory out of the cache."""


def real(flat: Tensor) -> Tensor:
    """View complex numbers as pairs of real numbers, as sums, codes and backends need; real tensors unchanged."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def check_block(block: int, remedy: str) -> None:
    """Raise ValueError unless the block is in 1 .. 65536."""
    if not 1 <= block <= LARGEST_BLOCK:
        raise ValueError(f"a codec's block must be in 1 .. {LARGEST_BLOCK}, got {block}: {remedy}")


def piece_length(block: int) -> int:
    """Return the number of elements in a piece: as many whole blocks as one pass through the table of noise covers."""
    return LARGEST_BLOCK - LARGEST_BLOCK % block


_here = threading.local()  # reused memory of each thread, by dtype


def scratch(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory that is valid until this thread asks again: on a host fresh pages cost more than the work."""
    if device.type != "cpu":
        return torch.empty(elements, dtype=dtype, device=device)
    held: Tensor | None = getattr(_here, str(dtype), None)
    if held is None or held.numel() < elements:
        held = torch.empty(elements, dtype=dtype, device=device)
        setattr(_here, str(dtype), held)
    return held[:elements]


def divisor(number: float, device: torch.device) -> Tensor:
    """Return the divisor as a tensor: CUDA would multiply by a number's reciprocal, which rounds differently."""
    return torch.full((), number, dtype=torch.float32, device=device)


def pieces(message: Tensor, block: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, stop, block size) of runs of whole blocks to encode at once, then the rest as one block."""
    length = message.numel()
    whole = length - length % block
    most = piece_length(block) * (PIECES if message.device.type == "cpu" else PIECES_ON_DEVICE)
    for start in range(0, whole, most):
        yield start, min(start + most, whole), block
    if whole < length:
        yield whole, length, length - whole


# ---- noise -----------------------------------------------------------------------------------------------------------

MIDPOINTS = 2**16
_GOLDEN, _FIRST, _SECOND = -0x61C88647, 0x7FEB352D, -0x7B935975  # as signed 32-bit numbers


def key(*numbers: int) -> int:
    """Hash integers to a 63-bit key (SplitMix64 over them in turn). Source: Steele et al., OOPSLA 2014."""
    state = 0
    for number in numbers:
        state = (state ^ number) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


def dither(number: int, key: int, piece: int, device: torch.device) -> Callable[[int, int, Tensor], Tensor]:
    """Return a function (start, stop, out) that fills `out` with the noise of elements start .. stop of `number`, each
    of the 2^16 midpoints of (-1/2, 1/2) as likely. All midpoints are shuffled once; a piece, of 2^16 elements at most,
    reads them from a hashed index on: no two numbers of a piece are equal, and two pieces seldom begin alike."""
    pieces, table = -(-number // piece), midpoints(device)
    first = key & 0x7FFFFFFF  # a signed number of 32 bits
    if device.type != "cpu":
        # first + 0, g, 2g, ... with the golden ratio of 2^32, wrapped: neighbours differ much before they are hashed.
        places = torch.arange(pieces, dtype=torch.int32, device=device).mul_(_GOLDEN).add_(first)
        starts = _hashed(places).bitwise_and_(MIDPOINTS - 1)
        return lambda start, stop, out: out.copy_(_gathered(table, starts, piece, start, stop))
    begins = [_hash(place * _GOLDEN + first) & MIDPOINTS - 1 for place in range(pieces)]

    def copied(start: int, stop: int, out: Tensor) -> Tensor:
        for place in range(start - start % piece, stop, piece):  # the parts of the table that the pieces read
            one, end = max(place, start), min(place + piece, stop)
            at = begins[place // piece] - place
            out[one - start : end - start].copy_(table[at + one : at + end])
        return out

    return copied


def _hashed(x: Tensor) -> Tensor:
    """Hash 32-bit numbers in place, a bijection. Source: Mueller and Wellons, "lowbias32"."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_FIRST)  # the mask makes an arithmetic shift a logical one
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_SECOND)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def _hash(x: int) -> int:
    """Hash one number as `_hashed`: for a few numbers a tensor's operations take longer."""
    x &= 0xFFFFFFFF
    x = (x ^ x >> 16) * _FIRST & 0xFFFFFFFF
    x = (x ^ x >> 15) * _SECOND & 0xFFFFFFFF
    return x ^ x >> 16


def _gathered(table: Tensor, starts: Tensor, piece: int, start: int, stop: int) -> Tensor:
    """Return the noise [stop - start] of all pieces on a device, in one call."""
    # Row k of the view begins at index k of the table: no indices are written to memory.
    rows = table.unfold(0, piece, 1).index_select(0, starts[start // piece : -(-stop // piece)])
    return rows.view(-1)[start % piece :][: stop - start]


@lru_cache(maxsize=4)
def midpoints(device: torch.device) -> Tensor:
    """Return the shuffled midpoints of (-1/2, 1/2), [2 * 2^16]: each twice, so that all follow from every index on."""
    order = _hashed(_hashed(torch.arange(MIDPOINTS, dtype=torch.int32, device="cpu"))).argsort()
    exact = order.float()  # not the default type, which half precision changes while it trains
    return exact.add_(0.5).div_(MIDPOINTS).sub_(0.5).repeat(2).to(device)
