"""A message in blocks that are coded for themselves, and in pieces of so many blocks as are good to work on at once."""

from collections.abc import Iterator

from torch import Tensor

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
