"""One result of what several workers have given: means, sums, the first one's. Without messages.

Members may meet for unlike things: a hook or callback that decides by what a newcomer isn't given makes it call
something else than the members do, or once more. Calls are matched by their order in a round, and a mean of what
somebody meant as a decision would be nonsense: who isn't as most are ends with why, and the others go on (`of_alike`).
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
    """Means by place, in float32 at least; what isn't floating point is the oldest's."""
    return [mean_of_place(rows) for rows in zip(*given, strict=True)]


def mean_of_place(rows: Sequence[Tensor]) -> Tensor:  # [workers] of one shape -> that shape
    first = rows[0]
    if not (first.is_floating_point() or first.is_complex()):
        return first
    exact = torch.promote_types(first.dtype, torch.float32)  # sums of bfloat16 would lose the small ones
    total = torch.zeros_like(first, dtype=exact)
    for row in rows:
        total.add_(row.to(exact) / len(rows))  # divided first: a sum of large ones would overflow
    return total.to(first.dtype)


first_of: Callable[[Sequence[Any]], Any] = itemgetter(0)


def reduced(operation: str, given: Sequence[Tensor]) -> Tensor:
    """ValueError for an operation that isn't known."""
    rows = torch.stack(list(given))  # [workers, ...]
    mean = partial(torch.mean, dtype=None if rows.is_floating_point() else torch.float32)
    known: dict[str, Callable[..., Tensor]] = {"sum": torch.sum, "mean": mean, "avg": mean}
    known |= {"min": torch.amin, "max": torch.amax, "product": torch.prod}
    if operation not in known:
        raise ValueError(f"unknown reduction {operation!r}: use one of {', '.join(known)}")
    return known[operation](rows, dim=0)


def of_each(made: Callable[[Sequence[Any]], Any]) -> Callable[[Sequence[Sequence[Any]]], Any]:
    """Make a function of rows, one for each worker, from one of what all devices have given."""

    def of_rows(rows: Sequence[Sequence[Any]]) -> Any:
        return made([own for row in rows for own in row])

    return wraps(made)(of_rows)


def moved(value: Any, device: torch.device) -> Any:
    """The same, its tensors there."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), value)


NAMES: dict[Any, str] = {means_of: "means", first_of: "the oldest's value", reduced: "a reduction", torch.stack: "rows"}


class Unlike(RuntimeError):
    """This worker meets for something else than most members."""

    def __init__(self, mine: str, theirs: str) -> None:
        super().__init__(
            f"this worker asks the members for {mine}, and most of them ask for {theirs}: a hook or a callback decides "
            "by what a newcomer isn't given. Keep it in its state_dict; started again this worker joins as a new one"
        )


def named(value: Any, made: Callable[[Sequence[Any]], Any]) -> str:
    """Name of the operation that a member asks for: `made` of the values of all its devices, or of the first one's."""
    each = getattr(made, "__wrapped__", None)
    call, own = (made, value) if each is None else (each, value[0])
    kind = call.func if isinstance(call, partial) else call
    if kind is means_of:
        return f"{NAMES[kind]} of {len(value)} tensors"
    return NAMES.get(kind, "a decision" if isinstance(own, bool) else "everybody's value")


def of_alike(name: str, made: Callable[[Sequence[Any]], Any]) -> Callable[[Sequence[Any]], Any]:
    """(name, `made`) of those that meet for what most meet for; of as many the oldest's. From (name, value) of each.
    Unlike where this worker, which would make it, meets for something else."""

    def of(given: Sequence[Any]) -> Any:
        ((most, _),) = Counter(mine for mine, _ in given).most_common(1)  # of as many the first counted: the oldest's
        if most != name:
            raise Unlike(name, most)
        return [most, made([value for mine, value in given if mine == most])]

    return of
