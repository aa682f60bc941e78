"""Blocks of a message: how it is worked on in pieces, memory for that, and noise for rounding at random.

Random numbers are a function of (key, place): nothing to save, equal on every device and in the simulation.
"""

import threading
from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
from torch import Tensor

LARGEST_BLOCK = 2**16
PIECES, PIECES_ON_DEVICE = 4, 64
"""Worked on at once. A host's operations on one take about as long as Python does to ask for them, and 1 MB still is in
its cache. A launch costs a device more than memory that is no cache."""


def real(flat: Tensor) -> Tensor:
    """The same memory, a complex number as two: sums, codes and messages of backends are of real ones."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def check_block(block: int, remedy: str) -> None:
    """ValueError unless it is in 1 .. 65536."""
    if not 1 <= block <= LARGEST_BLOCK:
        raise ValueError(f"a codec's block must be in 1 .. {LARGEST_BLOCK}, got {block}: {remedy}")


def piece_length(block: int) -> int:
    """Elements of as many whole blocks as have one place in the table of noise."""
    return LARGEST_BLOCK - LARGEST_BLOCK % block


_here = threading.local()  # reused memory of each thread, by dtype


def scratch(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory until this thread asks again: on a host fresh pages cost more than the work."""
    if device.type != "cpu":
        return torch.empty(elements, dtype=dtype, device=device)
    held: Tensor | None = getattr(_here, str(dtype), None)
    if held is None or held.numel() < elements:
        held = torch.empty(elements, dtype=dtype, device=device)
        setattr(_here, str(dtype), held)
    return held[:elements]


def divisor(number: float, device: torch.device) -> Tensor:
    """Divisor as a tensor: a host divides by it, but CUDA multiplies by a number's reciprocal and rounds otherwise."""
    return torch.full((), number, dtype=torch.float32, device=device)


def pieces(message: Tensor, block: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, stop, block size): runs of whole blocks of a good size to work on, then the rest as one block."""
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
    """A 63-bit key of a tuple of integers (SplitMix64 over them in turn). Source: Steele et al., OOPSLA 2014."""
    state = 0
    for number in numbers:
        state = (state ^ number) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


def dither(number: int, key: int, piece: int, device: torch.device) -> Callable[[int, int, Tensor], Tensor]:
    """(start, stop, out) -> out, the noise of these places of `number`: each of the 2^16 midpoints of (-1/2, 1/2) as
    likely.

    All midpoints are shuffled once; a piece, of 2^16 places at most, reads them from a hashed place on: no two numbers
    of a piece are equal, and two pieces seldom begin alike.
    """
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
    """The same of one number: for a few a tensor's operations take longer."""
    x &= 0xFFFFFFFF
    x = (x ^ x >> 16) * _FIRST & 0xFFFFFFFF
    x = (x ^ x >> 15) * _SECOND & 0xFFFFFFFF
    return x ^ x >> 16


def _gathered(table: Tensor, starts: Tensor, piece: int, start: int, stop: int) -> Tensor:
    """[stop - start], what the pieces read on a device, in one call for all of them."""
    # Row k of the view is what begins at place k: nothing but the numbers themselves is written.
    rows = table.unfold(0, piece, 1).index_select(0, starts[start // piece : -(-stop // piece)])
    return rows.view(-1)[start % piece :][: stop - start]


@lru_cache(maxsize=4)
def midpoints(device: torch.device) -> Tensor:
    """[2 * 2^16], the midpoints of (-1/2, 1/2), shuffled; each twice, so that from every place on there are all."""
    order = _hashed(_hashed(torch.arange(MIDPOINTS, dtype=torch.int32, device="cpu"))).argsort()
    exact = order.float()  # not the default type, which half precision changes while it trains
    return exact.add_(0.5).div_(MIDPOINTS).sub_(0.5).repeat(2).to(device)
