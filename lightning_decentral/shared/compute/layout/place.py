"""Memory layout of a parameter: shape, type, strides. Its place in a message and in a rule's state rests on it."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Strides = tuple[int, ...]


def dense_strides(tensor: Tensor) -> Strides:
    """Strides of a dense copy, which keeps the dimensions' order in memory (channels_last stays channels_last)."""
    size, own, found, step = tensor.shape, tensor.stride(), [1] * tensor.dim(), 1
    for dim in reversed(memory_order(size, own)):
        found[dim], step = step, step * size[dim]
    dense = all(mine == new for mine, new, n in zip(own, found, size, strict=True) if n > 1)
    return own if dense else tuple(found)


def memory_order(size: Sequence[int], strides: Strides) -> tuple[int, ...]:
    """Dimensions from the slowest to the fastest; those of size 1, whose strides mean nothing, are left out."""
    long = [d for d in range(len(size)) if size[d] > 1]
    return tuple(sorted(long, key=lambda d: (-strides[d], d)))


def is_row_major(size: Sequence[int], strides: Strides) -> bool:
    order = memory_order(size, strides)
    return order == tuple(sorted(order))


@dataclass(frozen=True)
class Place:
    """Shape, dtype and strides of a parameter."""

    shape: torch.Size
    dtype: torch.dtype
    strides: Strides

    @classmethod
    def of(cls, tensor: Tensor) -> "Place":
        return cls(tensor.shape, tensor.dtype, dense_strides(tensor))

    @classmethod
    def row_major(cls, tensor: Tensor) -> "Place":
        return cls(tensor.shape, tensor.dtype, torch.empty(tuple(tensor.shape), device="meta").stride())

    @property
    def order(self) -> tuple[int, ...]:
        return memory_order(self.shape, self.strides)

    def refuse_changed(self, tensor: Tensor) -> None:
        """ValueError where its shape or type became another."""
        if (tensor.shape, tensor.dtype) != (self.shape, self.dtype):
            raise ValueError(
                f"a parameter of {self} became {Place.of(tensor)} after set-up, and messages have its place: change "
                "it in configure_model() or setup(), on every worker"
            )

    def check(self, tensor: Tensor) -> None:
        """ValueError where it became another; a warning where it lies otherwise."""
        self.refuse_changed(tensor)
        if memory_order(tensor.shape, dense_strides(tensor)) != memory_order(self.shape, self.strides):
            warnings.warn(
                f"a parameter of {self} got strides {tensor.stride()} after set-up, and gets those back that all "
                "workers began with: give a memory format in configure_model() or setup()",
                stacklevel=2,
            )

    def __str__(self) -> str:
        return f"shape {tuple(self.shape)}, {self.dtype}"


class Laid(Protocol):
    """A flat tensor in which parameters lie."""

    @property
    def places(self) -> Sequence[Place]: ...


def orders(buckets: Iterable[Laid]) -> list[list[int]]:
    """Orders of dimensions in memory, for a checkpoint, whose messages and rules' states are flat memory."""
    return [[*place.order] for bucket in buckets for place in bucket.places]


def refuse_reordered(state: Mapping[str, Any], buckets: Iterable[Laid]) -> None:
    """ValueError where what was saved in other orders would be read in these."""
    flat = any(state["states"]) or state["flights"] or len(state["exchange"]) > 1  # other than the codec's name
    now = orders(buckets)
    if flat and len(state.get("orders", ())) == len(now) and state["orders"] != now:
        raise ValueError(
            "the checkpoint's messages lie in another memory order: give the model the memory format that it had, or "
            "delete its .workers folder to start from the mean"
        )
