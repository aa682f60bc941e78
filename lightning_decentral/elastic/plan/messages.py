"""Messages between a worker and the lobby: each time all there is to know, so a lost one costs nothing.

    worker -> lobby, and member -> member where no lobby answers:    Heartbeat
    lobby  -> worker:                                                LobbyUpdate

As JSON they are lists and objects of their fields; what isn't is refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from math import isfinite
from typing import Any, TypeVar

from lightning_decentral.elastic.plan.view import View

History = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Heartbeat:
    """A heartbeat of a worker: its sign of life.

    Args:
        sender: the name of this start of this worker; one that starts again has another.
        count: rises with every beat.
        place: "host:port" where it is reached by other members.
        view: the last one in force for it.
        coming: one that it knows, but that isn't in force for it.
        round: the next that it begins.
        entered: (number, first round) of the last views that came into force for it.
        pace: seconds that a round takes; 0: unknown.
        origin: of the parameters it has; empty: it has none yet.
        donor: whom it fetches them from.
        failed: a donor that didn't serve.
        seen: the highest number of a view that it knows of.
        leaving: it ends, and nobody needs to wait.
        asks: the lobby is silent to it: a member with a lobby answers. An answer doesn't ask, and has none.
    """

    sender: str
    count: int
    place: str
    view: View | None = None
    coming: View | None = None
    round: int = 0
    entered: History = ()
    pace: float = 0.0
    origin: str = ""
    donor: str = ""
    failed: str = ""
    seen: int = 0
    leaving: bool = False
    asks: bool = False


@dataclass(frozen=True)
class LobbyUpdate:
    """Message from the lobby to a worker.

    Args:
        acknowledged: the count of its last beat that the lobby knows.
        view: the highest view.
        agreed: the number of the highest view that may come into force.
        gone: members that are silent, or have left.
        entered: {member: the same of it}
        round: the newest that one of them has come to, as far as the lobby knows.
        donor: (name, place) to fetch from; empty: nobody.
        founder: this worker's own parameters are those the run begins with.
        out: the run went on without it: it comes back as a newcomer.
        over: all members have ended: who comes now takes no part.
        paused: why nobody goes on; empty: they do.
        least: of the lobby's bounds.
        dead_after: seconds, of the lobby's times.
    """

    acknowledged: int
    view: View | None
    agreed: int
    gone: tuple[str, ...]
    entered: Mapping[str, History]
    round: int
    donor: tuple[str, str] | None
    founder: bool
    out: bool
    over: bool
    paused: str
    least: int
    dead_after: float


def read_heartbeat(found: Any) -> Heartbeat:
    """Read a `Heartbeat` from JSON. ValueError unless it is what `asdict` makes of one."""
    return _read(Heartbeat, found)


def read_update(found: Any) -> LobbyUpdate:
    """Read a `LobbyUpdate` from JSON. ValueError unless it is what `asdict` makes of one."""
    return _read(LobbyUpdate, found)


T = TypeVar("T")


def _read(kind: Callable[..., T], found: Any) -> T:
    kinds = {field.name: field.type for field in fields(kind)}  # type: ignore[arg-type]
    if type(found) is not dict or set(found) != set(kinds):
        raise ValueError(f"a message has other fields than {', '.join(kinds)}: give every worker the same version")
    return kind(**{name: _KINDS[kinds[name]](value) for name, value in found.items()})


def _exactly(kind: type) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if type(value) is not kind:
            raise ValueError(f"a message has {value!r} where a {kind.__name__} belongs")
        return value

    return read


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not isfinite(value):
        raise ValueError(f"a message has {value!r} where a number belongs")
    return float(value)


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(_exactly(str), _exactly(list)(value)))


def _pair(value: Any) -> tuple[str, str] | None:
    if value is None:
        return None
    name, place = _texts(value)
    return name, place


def _view(value: Any) -> View | None:
    return None if value is None else _read(View, value)


def _history(value: Any) -> History:
    pairs = [tuple(map(_exactly(int), _exactly(list)(pair))) for pair in _exactly(list)(value)]
    return tuple((number, round) for number, round in pairs)


def _histories(value: Any) -> dict[str, History]:
    return {_exactly(str)(name): _history(rounds) for name, rounds in _exactly(dict)(value).items()}


_KINDS: dict[Any, Callable[[Any], Any]] = {
    str: _exactly(str),
    int: _exactly(int),
    bool: _exactly(bool),
    float: _seconds,
    tuple[str, ...]: _texts,
    tuple[str, str] | None: _pair,
    View | None: _view,
    History: _history,
    Mapping[str, History]: _histories,
}
