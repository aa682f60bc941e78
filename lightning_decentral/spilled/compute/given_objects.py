"""Objects among the arguments of a call: the second run finds their attributes as the first one found them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

Holder = dict[Any, Any] | list[Any]
NUMBERS = (bool, int, float, str, type(None))
LEAVES = (*NUMBERS, nn.Module, type, ModuleType)  # a module's buffers are looked after elsewhere


@runtime_checkable
class Cache(Protocol):
    """Cache of keys and values, like those of transformers: a block writes its own there, and reads them at once."""

    def update(self, *args: Any, **kwargs: Any) -> Any: ...

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int: ...


@dataclass(frozen=True)
class _Owner:
    """The outermost object, or a cache, that something is a part of."""

    value: Any
    is_cache: bool

    @property
    def kind(self) -> str:
        return type(self.value).__name__


@dataclass(frozen=True)
class _Held:
    """A dictionary, a list, or the attributes of an object, and what they held."""

    holder: Holder
    former: Holder
    owner: _Owner

    @property
    def changed(self) -> bool:
        now, former = _parts(self.holder), _parts(self.former)
        keys_differ = isinstance(self.holder, dict) and list(self.holder) != list(self.former)
        # The same objects, or equal numbers and texts.
        same = (
            a is b or (isinstance(a, NUMBERS) and isinstance(b, NUMBERS) and a == b)
            for a, b in zip(now, former, strict=False)
        )
        return keys_differ or len(now) != len(former) or not all(same)


class GivenObjects:
    """Create it before the call; `put_back` behind it, and run the second call within `again`.

    Args:
        arguments: (args, kwargs) of the call.
        inputs: the tensors in them that the backward gives gradients to.

    Attributes:
        unreached: types of the objects that hold other tensors which need gradients.
    """

    def __init__(self, arguments: tuple[Iterable[Any], dict[str, Any]], inputs: Sequence[Tensor]) -> None:
        self._held: list[_Held] = []
        self._tensors: list[tuple[Tensor, int, _Owner]] = []
        (args, kwargs), seen = arguments, {id(tensor) for tensor in inputs}
        waiting = [(value, _Owner(value, isinstance(value, Cache))) for value in (*args, *kwargs.values())]
        while waiting:
            value, owner = waiting.pop()
            if isinstance(value, LEAVES) or id(value) in seen:
                continue
            seen.add(id(value))  # objects may hold each other in circles
            if isinstance(value, Tensor):
                self._tensors.append((value, _version(value), owner))
                continue
            attributes = getattr(value, "__dict__", None)
            if attributes is not None and not owner.is_cache and isinstance(value, Cache):
                owner = _Owner(value, True)  # what a cache holds is its own, also where others hold the cache
            holders = [holder for holder in (value, attributes) if isinstance(holder, (dict, list))]
            self._held += [_Held(holder, _copy(holder), owner) for holder in holders]
            parts = [part for holder in holders for part in _parts(holder)]
            waiting += [(part, owner) for part in (*parts, *(value if isinstance(value, tuple) else ()))]
        self.unreached = [owner.kind for tensor, _, owner in self._tensors if tensor.requires_grad]

    def put_back(self) -> tuple[list[Any], list[str]]:
        """(caches that were written to, and are as before now; types of what else was written to)."""
        self._held = [held for held in self._held if held.changed]
        others = [held.owner.kind for held in self._held if not held.owner.is_cache]
        others += [owner.kind for tensor, version, owner in self._tensors if _version(tensor) != version]
        caches = {id(held.owner.value): held.owner.value for held in self._held if held.owner.is_cache}
        self._tensors = []  # they are held no longer: their memory is the device's
        for held in self._held:
            _put(held.holder, held.former)
        return list(caches.values()), others

    @contextmanager
    def again(self) -> Iterator[None]:
        """Context manager in which the objects are as before the call; afterwards as they are now."""
        now = [_copy(held.holder) for held in self._held]
        try:
            for held in self._held:
                _put(held.holder, held.former)
            yield
        finally:
            for held, values in zip(self._held, now, strict=True):
                _put(held.holder, values)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # those made by inference count nothing


def _copy(holder: Holder) -> Holder:
    return list(holder) if isinstance(holder, list) else dict(holder)


def _parts(holder: Holder) -> Collection[Any]:
    return holder if isinstance(holder, list) else holder.values()


def _put(holder: Holder, values: Holder) -> None:
    holder.clear()
    if isinstance(holder, list):
        holder.extend(values)
    else:
        holder.update(values)
