"""What surrounds a call of user code: a thread's torch modes, state to restore before a second run, patched functions.

Modes of torch belong to a thread (gradients, autocast, function modes, stream): they are read in one thread and entered
in another. In addition to inputs, parameters and buffers, a call depends on Python's and numpy's generators,
`torch.Generator`s that the module holds, and its plain attributes: numbers, text, lists, dictionaries, sets, deques.
Changes to anything else (a file, an iterator, an object) happen twice when the call runs twice."""

import inspect
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from threading import Lock
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_decentral.shared.compute import cuda


class Autocast:
    """Records the autocast modes of the host and of a device, to enter them again."""

    def __init__(self, place: torch.device) -> None:
        kinds = dict.fromkeys(("cpu", place.type))  # a single one, where the device is the host
        self._autocast = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]
        self._cache = torch.is_autocast_cache_enabled()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Enter the recorded autocast modes."""
        with ExitStack() as stack:
            for kind, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self._cache))
            yield


class ThreadModes:
    """Records the torch modes of this thread (autocast, gradients), for another thread that continues its work."""

    def __init__(self, place: torch.device) -> None:
        self._autocast = Autocast(place)
        self._gradients, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._functions, self._dispatches = _get_current_function_mode_stack(), _get_current_dispatch_mode_stack()
        self._stream = cuda.current_stream(place) if place.type == "cuda" else None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Enter the recorded modes in the current thread."""
        with ExitStack() as stack:
            if self._stream is not None:
                stack.enter_context(cuda.on(self._stream))  # makes the stream's device current, too
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._gradients))
            for mode in (*self._functions, *self._dispatches):  # in the order in which they were entered
                stack.enter_context(mode)
            stack.enter_context(self._autocast.again())
            yield


PLAIN = (bool, int, float, complex, str, bytes, type(None))
TORCH = frozenset(vars(nn.Module()))  # attributes that every module has: parameters, buffers, hooks
Held = list[Any] | set[Any] | dict[Any, Any] | deque[Any]
HELD = (list, set, dict, deque)


class Remembered:
    """Records a module's state before a first run; run a second time within `again`, or `put_back` the state."""

    def __init__(self, module: nn.Module) -> None:
        self._random: Any = random.getstate()
        self._numpy: Any = np.random.get_state()
        parts = [vars(part) for part in module.modules()]
        self._names = [(held, frozenset(held)) for held in parts]
        own = [(held, name, value) for held in parts for name, value in held.items() if name not in TORCH]
        self._bound = [row for row in own if _rebound(row[2])]
        self._held = [(value, _copied(value)) for _, _, value in own if type(value) in HELD]
        generators = [value for *_, value in own if isinstance(value, torch.Generator)]
        self._generators = [(generator, generator.get_state()) for generator in generators]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Restore the recorded state within the context; afterwards the present state."""
        numbers, drawn = random.getstate(), np.random.get_state()
        back = self.put_back()  # the state that the first run has left, to be restored afterwards
        try:
            yield
        finally:
            np.random.set_state(drawn)
            random.setstate(numbers)
            for put in back:
                put()

    def put_back(self) -> list[Callable[[], object]]:
        """Restore the recorded state. Returns functions that undo that, but for Python's and numpy's generators."""
        back: list[Callable[[], object]] = []
        for held, names in self._names:
            for name in [name for name in held.keys() - names if _rebound(held[name])]:
                back.append(partial(held.update, {name: held.pop(name)}))
        for held, name, value in self._bound:
            if name in held and held[name] is not value:
                back.append(partial(held.update, {name: held[name]}))
                held[name] = value
        for value, former in self._held:
            back.append(partial(refill, value, _copied(value)))
            refill(value, former)
        for generator, state in self._generators:
            back.append(partial(generator.set_state, generator.get_state()))
            generator.set_state(state)
        random.setstate(self._random)
        np.random.set_state(self._numpy)
        return back


def _rebound(value: Any) -> bool:
    """Return whether an attribute of a module is restored; lists of parameters, as nn.RNN has, aren't."""
    if type(value) in HELD:
        return not any(isinstance(part, Tensor) for part in value)
    return isinstance(value, (*PLAIN, Tensor))


def _copied(value: Any) -> Any:
    """Copy nested containers, not the values in them."""
    if type(value) not in HELD:
        return value
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    return type(value)(_copied(part) for part in value)


def refill(value: Held, former: Held) -> None:
    """Put the contents of `former` in the place of a container's own."""
    value.clear()
    value.update(former) if isinstance(value, (dict, set)) else value.extend(former)


# ---- functions of libraries, replaced for a while wherever they were imported to ------------------------------------

# `from torch.nn.utils import get_total_norm` holds the function itself: its code is replaced, not a module's name.
NAME = "_redirected_by_lightning_decentral"
_redirecting = Lock()


def _stub(*args: Any, **kwargs: Any) -> Any:
    """Stand in for a redirected function's code, with that function's globals."""
    return _redirected_by_lightning_decentral(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821


class Redirected:
    """Redirects a function: until `close`, a call of the function calls `by(original, *args, **kwargs)`.

    Where a function has several redirections, as with workers in threads, a call uses the newest one of its thread
    (of its context, which another thread may carry over), else the newest of all. The function is a plain or decorated
    one; no other function of its module may be redirected meanwhile."""

    def __init__(self, function: Callable[..., Any], by: Callable[..., Any]) -> None:
        target: Any = inspect.unwrap(function)  # a decorator's wrapper calls the original function, found by its code
        self.by = by
        with _redirecting:
            if NAME not in target.__globals__:  # nobody redirects it yet
                target.__globals__[NAME] = _Replaced(target)
            self._replaced: _Replaced = target.__globals__[NAME]
            assert self._replaced.target is target, "one function of a module at a time"
            self._replaced.owners.append(self)
        _own.set((*(one for one in _own.get() if one.open), self))

    @property
    def open(self) -> bool:
        return self in self._replaced.owners

    def close(self) -> None:
        """Restore the function, unless others redirect it, too."""
        with _redirecting:
            if self.open:
                self._replaced.owners.remove(self)
                if not self._replaced.owners:
                    self._replaced.undo()
        _own.set(tuple(one for one in _own.get() if one.open))


_own: ContextVar[tuple[Redirected, ...]] = ContextVar(NAME, default=())  # redirections of this thread


class _Replaced:
    """Function whose code is replaced until `undo`; `owners` are its redirections, the newest last."""

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
        newest = (own or owners)[-1:]  # the last redirection may have been closed just now
        return newest[0].by(self._original, *args, **kwargs) if newest else self._original(*args, **kwargs)

    def undo(self) -> None:
        target = self.target
        target.__code__, target.__defaults__, target.__kwdefaults__ = self._code, self._defaults, self._keywords
        del target.__globals__[NAME]
