"""State that a call of a module depends on besides inputs, parameters and buffers, so that a second run repeats it.

Python's and numpy's generators, `torch.Generator`s that the module holds, and its plain attributes: numbers, text, and
lists, dictionaries, sets and deques. What a call changes elsewhere (a file, an iterator, an object) happens twice.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

PLAIN = (bool, int, float, complex, str, bytes, type(None))
TORCH = frozenset(vars(nn.Module()))
"""Attributes that every module has: parameters, buffers, hooks."""
Held = list[Any] | set[Any] | dict[Any, Any] | deque[Any]
HELD = (list, set, dict, deque)


class Remembered:
    """Create it just before the first run; run the second one within `again`, or `put_back` what the runs changed."""

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
        """Restore the remembered state within; afterwards bring back the present one."""
        numbers, drawn = random.getstate(), np.random.get_state()
        back = self.put_back()
        try:
            yield
        finally:
            np.random.set_state(drawn)
            random.setstate(numbers)
            for put in back:
                put()

    def put_back(self) -> list[Callable[[], None]]:
        """Restore the remembered state. Returns what undoes that, but for Python's and numpy's generators."""
        back: list[Callable[[], None]] = []
        for held, names in self._names:
            for name in [name for name in held.keys() - names if _rebound(held[name])]:
                back.append(_attribute(held, name, held.pop(name)))
        for held, name, value in self._bound:
            if name in held and held[name] is not value:
                back.append(_attribute(held, name, held[name]))
                held[name] = value
        for value, former in self._held:
            back.append(_contents(value, _copied(value)))
            _put(value, former)
        for generator, state in self._generators:
            back.append(_state(generator, generator.get_state()))
            generator.set_state(state)
        random.setstate(self._random)
        np.random.set_state(self._numpy)
        return back


def _rebound(value: Any) -> bool:
    """Return whether an attribute is restored: not lists of parameters, as nn.RNN has, which come and go."""
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


def _put(value: Held, former: Held) -> None:
    value.clear()
    value.update(former) if isinstance(value, (dict, set)) else value.extend(former)


def _attribute(held: dict[str, Any], name: str, value: Any) -> Callable[[], None]:
    return lambda: held.update({name: value})


def _contents(value: Held, now: Held) -> Callable[[], None]:
    return lambda: _put(value, now)


def _state(generator: torch.Generator, now: Tensor) -> Callable[[], None]:
    return lambda: (generator.set_state(now), None)[1]
