"""Members that meet for unlike things: who isn't as most are ends with why, and the others go on.

A hook or callback that decides by what a newcomer isn't given makes it call something else than the members do, or once
more. Calls are matched by their order in a round, and a mean of what somebody meant as a decision would be nonsense.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lightning_decentral.elastic.compute.gathered import first_of, means_of, reduced, stacked

NAMES: dict[Any, str] = {means_of: "means", first_of: "the oldest's value", reduced: "a reduction", stacked: "rows"}


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

    Raises:
        Unlike: this worker, which would make it, meets for something else.
    """

    def of(given: Sequence[Any]) -> Any:
        ((most, _),) = Counter(mine for mine, _ in given).most_common(1)
        if most != name:
            raise Unlike(name, most)
        return [most, made([value for mine, value in given if mine == most])]

    return of
