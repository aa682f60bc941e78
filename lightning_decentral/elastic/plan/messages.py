"""Messages between a worker and the lobby: each time all there is to know, so a lost one costs nothing.

    worker -> lobby, and member -> member where no lobby answers:    Heartbeat
    lobby  -> worker:                                                LobbyUpdate

As JSON they are lists and objects of their fields; what isn't is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import isfinite
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin

from lightning_decentral.elastic.plan.view import View

T = TypeVar("T")
History = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Heartbeat:
    """A heartbeat of a worker: its sign of life."""

    sender: str  # the name of this start of this worker; one that starts again has another
    count: int  # rises with every beat
    place: str  # "host:port" where it is reached by other members
    view: View | None = None  # the last one in force for it
    coming: View | None = None  # one that it knows, but that isn't in force for it
    round: int = 0  # the next that it begins
    entered: History = ()  # (number, first round) of the last views that came into force for it
    pace: float = 0.0  # seconds that a round takes; 0: unknown
    origin: str = ""  # of the parameters it has; empty: it has none yet
    donor: str = ""  # whom it fetches them from
    failed: str = ""  # a donor that didn't serve
    seen: int = 0  # the highest number of a view that it knows of
    leaving: bool = False  # it ends, and nobody needs to wait
    asks: bool = False  # the lobby is silent to it: a member with a lobby answers. An answer doesn't ask, and has none


@dataclass(frozen=True)
class LobbyUpdate:
    """Message from the lobby to a worker."""

    acknowledged: int  # the count of its last beat that the lobby knows
    view: View | None  # the highest view
    agreed: int  # the number of the highest view that may come into force
    gone: tuple[str, ...]  # members that are silent, or have left
    entered: Mapping[str, History]  # {member: the same of it}
    round: int  # the newest that one of them has come to, as far as the lobby knows
    donor: tuple[str, str] | None  # (name, place) to fetch from; empty: nobody
    founder: bool  # this worker's own parameters are those the run begins with
    out: bool  # the run went on without it: it comes back as a newcomer
    over: bool  # all members have ended: who comes now takes no part
    paused: str  # why nobody goes on; empty: they do
    least: int  # of the lobby's bounds
    dead_after: float  # seconds, of the lobby's times
    ended: tuple[str, ...] = ()  # members, of the view before too, whose connection to the lobby has ended


def read_message(kind: type[T], found: Any) -> T:
    """Read a `Heartbeat` or `LobbyUpdate` from JSON. ValueError unless it is what `asdict` makes of one."""
    types: dict[str, Any] = {field.name: field.type for field in fields(kind)}  # type: ignore[arg-type]
    if type(found) is not dict or set(found) != set(types):
        raise ValueError(f"a message has other fields than {', '.join(types)}: give every worker the same version")
    return kind(**{name: _value(types[name], value) for name, value in found.items()})


def _value(kind: Any, value: Any) -> Any:
    """Read a field of this type; True is no number, nor is "1"."""
    origin, args = get_origin(kind) or kind, get_args(kind)
    if origin is UnionType:
        return None if value is None else _value(args[0], value)
    if origin is View:
        return read_message(View, value)
    if origin is float:
        if type(value) not in (int, float) or not isfinite(value):
            raise ValueError(f"a message has {value!r} where a number belongs")
        return float(value)
    json_type = {tuple: list, Mapping: dict}.get(origin, origin)
    kinds = args[:1] * len(value) if args[1:] == (...,) and type(value) is list else args
    if type(value) is not json_type or (origin is tuple and len(value) != len(kinds)):
        raise ValueError(f"a message has {value!r} where a {json_type.__name__} belongs")
    if origin is Mapping:
        return {_value(args[0], name): _value(args[1], item) for name, item in value.items()}
    return tuple(map(_value, kinds, value)) if origin is tuple else value
