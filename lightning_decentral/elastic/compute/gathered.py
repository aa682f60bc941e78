"""Reductions of several workers' values in one process: means, sums, the first worker's value. No communication.

Members may call different collectives: a hook or callback whose decision depends on state that a newcomer lacks makes
the newcomer call another collective, or one more. Calls are matched by their order in a round, and the mean of a
decision would be nonsense. So a worker whose call differs from most ends with an error; others continue (`of_alike`).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial, wraps
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


def means_of(given: Sequence[Sequence[Tensor]]) -> list[Tensor]:  # [workers][places] -> [places]
    """Return the means by position, summed in float32 at least; of integers, the oldest worker's."""
    return [mean_of_place(rows) for rows in zip(*given, strict=True)]


def means_of_sound(given: Sequence[tuple[bool, Sequence[Tensor]]]) -> list[Tensor]:
    """Return the means of the sound workers, or of all if none is, from (whether it is sound, tensors) of each."""
    return means_of([row for sound, row in given if sound] or [row for _, row in given])


def mean_of_place(rows: Sequence[Tensor]) -> Tensor:  # [workers] of one shape -> that shape
    first = rows[0]
    if not (first.is_floating_point() or first.is_complex()):
        return first
    exact = torch.promote_types(first.dtype, torch.float32)  # sums in bfloat16 would lose small numbers
    total = torch.zeros_like(first, dtype=exact)
    for row in rows:
        total.add_(row.to(exact) / len(rows))  # divided first: a sum of large numbers would overflow
    return total.to(first.dtype)


first_of: Callable[[Sequence[Any]], Any] = itemgetter(0)


def reduced(operation: str, given: Sequence[Tensor]) -> Tensor:
    """Reduce the workers' tensors by an operation's name. ValueError for an unknown operation."""
    rows = torch.stack(list(given))  # [workers, ...]
    mean = partial(torch.mean, dtype=None if rows.is_floating_point() else torch.float32)
    known: dict[str, Callable[..., Tensor]] = {"sum": torch.sum, "mean": mean, "avg": mean}
    known |= {"min": torch.amin, "max": torch.amax, "product": torch.prod}
    if operation not in known:
        raise ValueError(f"unknown reduction {operation!r}: use one of {', '.join(known)}")
    return known[operation](rows, dim=0)


def of_each(made: Callable[[Sequence[Any]], Any]) -> Callable[[Sequence[Sequence[Any]]], Any]:
    """Turn a reduction over all devices' values into one over rows, one row of devices per worker."""

    def of_rows(rows: Sequence[Sequence[Any]]) -> Any:
        return made([own for row in rows for own in row])

    return wraps(made)(of_rows)


def moved(value: Any, device: torch.device) -> Any:
    """Return the value with its tensors on that device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), value)


NAMES: dict[Any, str] = {means_of: "means", first_of: "the oldest's value", reduced: "a reduction", torch.stack: "rows"}


class Unlike(RuntimeError):
    """Raised where this worker calls another collective than most members."""

    def __init__(self, mine: str, theirs: str) -> None:
        super().__init__(
            f"this worker asks the members for {mine}, but most ask for {theirs}: a hook or a callback depends on "
            "state that a newcomer lacks. Keep that state in its state_dict, and start this worker again"
        )


def named(value: Any, made: Callable[[Sequence[Any]], Any]) -> str:
    """Return the name of the reduction that a member calls, over all devices' values or over first devices' alone."""
    each = getattr(made, "__wrapped__", None)
    call, own = (made, value) if each is None else (each, value[0])
    kind = call.func if isinstance(call, partial) else call
    if kind is means_of:
        return f"{NAMES[kind]} of {len(value)} tensors"
    return NAMES.get(kind, "a decision" if isinstance(own, bool) else "everybody's value")


def of_alike(name: str, made: Callable[[Sequence[Any]], Any]) -> Callable[[Sequence[Any]], Any]:
    """Make the reduction of the values whose name is the most frequent (in a tie, the oldest's), from (name, value) of
    each member. Unlike if this worker, which computes it, asks for another name."""

    def of(given: Sequence[Any]) -> Any:
        ((most, _),) = Counter(mine for mine, _ in given).most_common(1)  # in a tie the first one: the oldest member's
        if most != name:
            raise Unlike(name, most)
        return [most, made([value for mine, value in given if mine == most])]

    return of
