"""Clock of a sweep's member: it stands still while the member waits for its turn.

    own time = time - seconds that this thread has waited for a device

What measures durations in a member (`trainer.max_time`, a callback's `time.time()`, a logger's seconds) then measures
the member's own, as in a training alone. Dates fall behind by what was waited. Other threads keep the true clock, by
which uploads sign and heartbeats are sent.
"""

import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import update_wrapper
from threading import get_ident
from types import FunctionType
from typing import Any

SECONDS, NANOSECONDS = ("time", "monotonic", "perf_counter"), ("time_ns", "monotonic_ns", "perf_counter_ns")

_true_ns = time.monotonic_ns
_waited_ns: dict[int, int] = {}
"""By thread; a forked worker goes on with its parent's."""


_standing: set[int] = set()


@contextmanager
def standing_still() -> Iterator[None]:
    """No time passes for this thread until the outermost of these blocks ends."""
    thread, began = get_ident(), _true_ns()
    if thread in _standing:
        yield
        return
    if not _waited_ns:
        _install()
    _standing.add(thread)
    try:
        yield
    finally:
        _standing.discard(thread)
        _waited_ns[thread] = _waited_ns.get(thread, 0) + _true_ns() - began


class _Own:
    """One of time's functions, less what the calling thread has waited.

    No function: as an attribute of a class it would become a method, which those of `time` don't.
    """

    def __init__(self, true: Callable[[], Any], unit: float) -> None:
        update_wrapper(self, true)  # it is pickled by the function's name
        self._true, self._unit = true, unit

    def __call__(self) -> Any:
        return self._true() - self._unit * _waited_ns.get(get_ident(), 0)

    def __reduce__(self) -> str:
        return self._true.__name__


def _install() -> None:
    """Wherever the functions were imported to: whoever wrote `from time import monotonic` holds the function itself."""
    gc.unfreeze()  # what was frozen for a fork has no referrers to gc
    trues = {name: getattr(time, name) for name in (*SECONDS, *NANOSECONDS)}
    holders = [holder for holder in gc.get_referrers(*trues.values()) if holder is not trues]
    by = {id(true): _Own(true, 1 if name in NANOSECONDS else 1e-9) for name, true in trues.items()}
    dictionaries = [holder if type(holder) is dict else getattr(holder, "__dict__", {}) for holder in holders]
    for names in [names for names in dictionaries if names is not globals()]:
        held = {key: by[id(value)] for key, value in names.items() if id(value) in by}
        if held:  # of a class there is a view alone, which takes nothing; its dictionary is a holder itself
            names.update(held)
    for owner in gc.get_referrers(*dictionaries, *(holder for holder in holders if type(holder) is tuple)):
        if type(owner) is FunctionType:  # def __init__(self, clock=time.monotonic)
            owner.__defaults__ = owner.__defaults__ and tuple(by.get(id(value), value) for value in owner.__defaults__)
        elif isinstance(owner, type):
            _modified(owner)
    _set_on_type(datetime, now=classmethod(_now), utcnow=classmethod(_utcnow))


def _now(cls: type[datetime], tz: Any = None) -> datetime:
    return cls.fromtimestamp(time.time(), tz)


def _utcnow(cls: type[datetime]) -> datetime:
    return cls.fromtimestamp(time.time(), timezone.utc).replace(tzinfo=None)


def _set_on_type(kind: type, **methods: Any) -> None:
    """A type of the interpreter's own takes no attributes; another class in its place would break isinstance and
    pickles of dates."""
    (attributes,) = gc.get_referents(vars(kind))
    attributes.update(methods)
    _modified(kind)


def _modified(kind: type) -> None:
    # Types remember what they have looked up.
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))
