"""Clock of a sweep's member: stands still while the member waits for its turn.

    own time = time - seconds that this thread has waited for a device

Durations measured in a member (`trainer.max_time`, a callback's `time.time()`, a logger's seconds) are then the
member's own, as in a single training. `datetime.now()` is the true date, and other threads keep the true clock, for
signed uploads and heartbeats."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import update_wrapper
from threading import get_ident
from types import FunctionType
from typing import Any

SECONDS, NANOSECONDS = ("time", "monotonic", "perf_counter"), ("time_ns", "monotonic_ns", "perf_counter_ns")

_true_ns = time.monotonic_ns
_waited_ns: dict[int, int] = {}  # {thread: nanoseconds that it waited}; a forked worker continues its parent's
_standing: set[int] = set()


@contextmanager
def standing_still() -> Iterator[None]:
    """Stop this thread's clock until the outermost of these contexts ends."""
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
    """Function of `time`, minus the time that the calling thread has waited.

    Not a Python function: as a class attribute it would become a method, unlike those of `time`."""

    def __init__(self, true: Callable[[], Any], unit: float) -> None:
        update_wrapper(self, true)  # pickled by the function's name
        self._true, self._unit = true, unit

    def __call__(self) -> Any:
        return self._true() - self._unit * _waited_ns.get(get_ident(), 0)

    def __reduce__(self) -> str:
        return self._true.__name__


def _install() -> None:
    """Replace time's functions wherever they were imported: `from time import monotonic` makes a separate reference."""
    gc.unfreeze()  # gc finds no referrers of what was frozen for a fork
    trues = {name: getattr(time, name) for name in (*SECONDS, *NANOSECONDS)}
    holders = [holder for holder in gc.get_referrers(*trues.values()) if holder is not trues]
    by = {id(true): _Own(true, 1 if name in NANOSECONDS else 1e-9) for name, true in trues.items()}
    for owner in gc.get_objects():
        if type(owner) is FunctionType:  # def __init__(self, clock=time.monotonic)
            owner.__defaults__ = owner.__defaults__ and tuple(by.get(id(value), value) for value in owner.__defaults__)
        elif issubclass(type(owner), type):  # by setattr: types cache their attributes
            for name, value in list(vars(owner).items()):
                if id(value) in by:
                    setattr(owner, name, by[id(value)])
    dictionaries = [holder if type(holder) is dict else getattr(holder, "__dict__", {}) for holder in holders]
    for names in [names for names in dictionaries if names is not globals()]:
        names.update({key: by[id(value)] for key, value in names.items() if id(value) in by})
