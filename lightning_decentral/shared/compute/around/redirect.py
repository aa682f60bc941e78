"""Functions of libraries, replaced for a while wherever they were imported to. Short: pipelines and islands use it.

`from torch.nn.utils import get_total_norm` holds the function itself: its code is replaced, not a module's name for it.
"""

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from threading import Lock
from types import CodeType, FunctionType
from typing import Any

NAME = "_redirected_by_lightning_decentral"
_lock = Lock()


def _stub(*args: Any, **kwargs: Any) -> Any:
    """Runs with the globals of the function whose code it takes the place of."""
    return _redirected_by_lightning_decentral(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821


class Redirected:
    """Redirection of a function: until `close`, a call of it calls `by(original, *args, **kwargs)`.

    Where several redirect it, as workers in threads of one process do, the newest of the calling thread is asked (of
    its context, which a thread that goes on in its place may carry over), and the newest of all where it has none.

    Args:
        function: a plain one, or one that a decorator wraps; no other of its module is redirected meanwhile.
    """

    def __init__(self, function: Callable[..., Any], by: Callable[..., Any]) -> None:
        target: Any = inspect.unwrap(function)
        self.by = by
        with _lock:
            if NAME not in target.__globals__:
                target.__globals__[NAME] = _Replaced(target)
            self._replaced: _Replaced = target.__globals__[NAME]
            assert self._replaced.target is target, "one function of a module at a time"
            self._replaced.owners.append(self)
        _own.set((*(one for one in _own.get() if one.open), self))

    @property
    def open(self) -> bool:
        return self in self._replaced.owners

    def close(self) -> None:
        """The function is itself again, unless others redirect it, too."""
        with _lock:
            if self.open:
                self._replaced.owners.remove(self)
                if not self._replaced.owners:
                    self._replaced.undo()
        _own.set(tuple(one for one in _own.get() if one.open))


_own: ContextVar[tuple[Redirected, ...]] = ContextVar(NAME, default=())
"""Redirections of this thread."""


class _Replaced:
    """A function whose code is another's until `undo`.

    Attributes:
        owners: who redirect it, the newest last.
    """

    def __init__(self, target: Any) -> None:
        self.target, self.owners = target, list[Redirected]()
        self._code: CodeType = target.__code__
        self._defaults, self._keywords = target.__defaults__, target.__kwdefaults__
        self._original = FunctionType(
            self._code, target.__globals__, target.__name__, self._defaults, target.__closure__
        )
        self._original.__kwdefaults__ = self._keywords
        target.__code__, target.__defaults__, target.__kwdefaults__ = _stub.__code__, None, None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owners = list(self.owners)
        own = [one for one in _own.get() if one in owners]
        newest = (own or owners)[-1:]  # the last may have left just now
        return newest[0].by(self._original, *args, **kwargs) if newest else self._original(*args, **kwargs)

    def undo(self) -> None:
        target = self.target
        target.__code__, target.__defaults__, target.__kwdefaults__ = self._code, self._defaults, self._keywords
        del target.__globals__[NAME]
