"""Messages between workers and the lobby. Each has the sender's full state, so a lost message costs nothing.

    worker -> lobby, and member -> member where no lobby answers:    Heartbeat
    lobby  -> worker:                                                LobbyUpdate

They are sent as JSON objects of their fields; anything else is refused."""

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
    """Heartbeat of a worker: shows that the worker lives, and reports its state."""

    sender: str  # the worker's name, which is new at every start
    count: int  # rises with every heartbeat
    place: str  # "host:port" at which other members reach this worker
    view: View | None = None  # the last view that came into force for this worker
    coming: View | None = None  # a newer view that it knows, not yet in force
    round: int = 0  # the next round that this worker begins
    entered: History = ()  # (number, first round) of its last views in force
    pace: float = 0.0  # seconds that a round takes; 0: unknown
    origin: str = ""  # founder whose parameters it has; empty: none yet
    donor: str = ""  # member from which it fetches the parameters
    failed: str = ""  # a donor that didn't send its state
    seen: int = 0  # the highest number of a view that this worker knows
    leaving: bool = False  # this worker ends, so others needn't wait
    asks: bool = False  # asks for an answer: the sender can't reach the lobby. Answers have it false
    trip: float = 0.0  # seconds between a heartbeat and the lobby's answer, a recent maximum; 0: unknown

    @property
    def reached(self) -> int:
        """The newest round that others must catch up with: none of a newcomer that waits for them in its first one."""
        return self.round if self.entered and self.round > self.entered[0][1] else 0


@dataclass(frozen=True)
class LobbyUpdate:
    """Message from the lobby to a worker."""

    acknowledged: int  # count of the last heartbeat that the lobby received
    view: View | None  # the highest view made
    agreed: int  # the number of the highest view that may come into force
    gone: tuple[str, ...]  # members that are silent, or have left
    entered: Mapping[str, History]  # {member: its `Heartbeat.entered`}
    round: int  # the newest round that a member has reached, as far as the lobby knows
    donor: tuple[str, str] | None  # (name, address) of the member to fetch from
    founder: bool  # the run begins with this worker's own parameters
    out: bool  # the run continued without this worker: it must join anew
    over: bool  # all members have ended: no worker can join any more
    paused: str  # reason why the members wait; empty if they don't
    least: int  # the lobby's minimum number of workers
    dead_after: float  # seconds of silence after which a worker is dead, as set at the lobby
    ended: tuple[str, ...] = ()  # members, and those of the previous view, whose connection to the lobby has ended


def read_message(kind: type[T], found: Any) -> T:
    """Read a `Heartbeat` or `LobbyUpdate` from JSON. ValueError for anything but the fields that `asdict` returns."""
    types: dict[str, Any] = {field.name: field.type for field in fields(kind)}  # type: ignore[arg-type]
    if type(found) is not dict or set(found) != set(types):
        raise ValueError(f"a message has other fields than {', '.join(types)}: give every worker the same version")
    return kind(**{name: _value(types[name], value) for name, value in found.items()})


def _value(kind: Any, value: Any) -> Any:
    """Read a field's value of this type from JSON. ValueError for another type; True and "1" are no numbers."""
    origin, args = get_origin(kind) or kind, get_args(kind)
    if origin is UnionType:
        return None if value is None else _value(args[0], value)
    if origin is View:
        return read_message(View, value)
    if origin is float:
        if type(value) not in (int, float) or not isfinite(value):
            raise ValueError(f"a message has {value!r} where a number belongs: give all workers one version")
        return float(value)
    json_type = {tuple: list, Mapping: dict}.get(origin, origin)
    kinds = args[:1] * len(value) if args[1:] == (...,) and type(value) is list else args
    if type(value) is not json_type or (origin is tuple and len(value) != len(kinds)):
        raise ValueError(f"a message has {value!r} where a {json_type.__name__} belongs: give all workers one version")
    if origin is Mapping:
        return {_value(args[0], name): _value(args[1], item) for name, item in value.items()}
    return tuple(map(_value, kinds, value)) if origin is tuple else value
