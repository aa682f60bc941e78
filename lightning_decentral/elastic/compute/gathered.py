"""One result of what several workers have given: means, sums, the first one's. Without messages."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only


def means_of(given: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Means by place, in float32 at least; what isn't floating point is the oldest's."""
    return [mean_of_place(rows) for rows in zip(*given, strict=True)]


def mean_of_place(rows: Sequence[Tensor]) -> Tensor:
    first = rows[0]
    if not (first.is_floating_point() or first.is_complex()):
        return first
    exact = torch.promote_types(first.dtype, torch.float32)
    total = torch.zeros_like(first, dtype=exact)
    for row in rows:
        total.add_(row.to(exact) / len(rows))
    return total.to(first.dtype)


def first_of(given: Sequence[Any]) -> Any:
    return given[0]


def reduced(operation: str, given: Sequence[Tensor]) -> Tensor:
    """ValueError for an operation that isn't known."""
    rows = torch.stack(list(given))
    known: dict[str, Callable[[], Tensor]] = {
        "sum": lambda: rows.sum(0),
        "mean": lambda: rows.mean(0, dtype=None if rows.is_floating_point() else torch.float32),
        "avg": lambda: rows.mean(0, dtype=None if rows.is_floating_point() else torch.float32),
        "min": lambda: rows.amin(0),
        "max": lambda: rows.amax(0),
        "product": lambda: rows.prod(0),
    }
    if operation not in known:
        raise ValueError(f"unknown reduction {operation!r}: use one of {', '.join(known)}")
    return known[operation]()


def stacked(given: Sequence[Tensor]) -> Tensor:
    """Stack one tensor of each worker: [workers, ...]."""
    return torch.stack(list(given))


def of_each(made: Callable[[Sequence[Any]], Any]) -> Callable[[Sequence[Sequence[Any]]], Any]:
    """Make a function of rows, one for each worker, from one of what all devices have given."""

    def of_rows(rows: Sequence[Sequence[Any]]) -> Any:
        return made([own for row in rows for own in row])

    return wraps(made)(of_rows)


def moved(value: Any, device: torch.device) -> Any:
    """The same, its tensors there."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), value)


def on_device(value: Any) -> bool:
    """Return whether one of its tensors isn't on the host."""
    return any(leaf.device.type != "cpu" for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
