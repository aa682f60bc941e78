"""A value by its structure: {dotted name: text} of everything it was constructed with, so that two can be compared.

A new option takes part by existing: fields of dataclasses are read, and of any other object what its constructor takes
and keeps under the same name, or that name behind an underscore.
"""

import inspect
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from datetime import timedelta
from enum import Enum
from functools import partial, singledispatch
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np

LONGEST = 60
"""Characters of a sequence that are shown; a longer one is its length and a checksum."""
DEEPEST = 12
"""Parts within parts; what is deeper is a cycle."""

Facts = Iterator[tuple[str, str]]


def described(value: object, name: str) -> dict[str, str]:
    """{name: what it is, name.part: what that is, ..}, in order: a class comes before what it was constructed with."""
    return dict(_facts(value, name))


def constructed(value: object, within: Iterable[type], skip: Iterable[str] = ()) -> dict[str, Any]:
    """{argument: what the object keeps of it} of the constructors of these classes."""
    names = dict.fromkeys(name for cls in within for name in _arguments(cls))
    kept = {name: getattr(value, name, getattr(value, f"_{name}", _NOTHING)) for name in names}
    return {name: part for name, part in kept.items() if part is not _NOTHING and name not in skip}


_NOTHING = object()


def first_difference(mine: Mapping[str, str], theirs: Mapping[str, str], sign: str = "=") -> tuple[str, str] | None:
    """First difference by name: (as the one has it, as the other does), `no name` where it's missing; or None."""
    name = next((name for name in (*theirs, *mine) if theirs.get(name) != mine.get(name)), None)
    if name is None:
        return None
    one, other = (f"{name}{sign}{of[name]}" if name in of else f"no {name}" for of in (mine, theirs))
    return one, other


def _arguments(cls: type) -> list[str]:
    if "__init__" not in vars(cls):
        return []
    try:
        parameters = list(inspect.signature(vars(cls)["__init__"]).parameters.values())[1:]
    except ValueError:  # built in
        return []
    return [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


@singledispatch
def _facts(value: Any, name: str) -> Facts:
    yield name, type(value).__qualname__
    if name.count(".") < DEEPEST:
        own = {f.name: getattr(value, f.name) for f in fields(value)} if is_dataclass(value) else None
        parts = constructed(value, type(value).__mro__[:-1]) if own is None else own
        for part in parts:
            yield from _facts(parts[part], f"{name}.{part}")


_PLAIN = (type(None), bool, int, float, complex, str, bytes, PurePath, timedelta, Enum)
_NAMED = (type, FunctionType, BuiltinFunctionType, MethodType)


def said(kind: type) -> None:
    """Values of this class are described by their `repr`: what has no structure that Python could see."""
    _facts.register(kind, lambda value, name: iter([(name, repr(value))]))


for _kind in _PLAIN:
    said(_kind)
for _named in _NAMED:
    _facts.register(_named, lambda value, name: iter([(name, f"{value.__module__}.{value.__qualname__}")]))


@_facts.register
def _(value: partial, name: str) -> Facts:  # type: ignore[type-arg]
    yield from _facts(value.func, name)
    yield from _facts(value.args, f"{name}.args")
    yield from _facts(value.keywords, f"{name}.keywords")


@_facts.register
def _(value: np.generic, name: str) -> Facts:
    yield name, f"{type(value).__name__}({value})"  # numpy 1's repr leaves out the type


@_facts.register
def _(value: np.ndarray, name: str) -> Facts:
    yield name, _short(value.tolist(), value.size)


@_facts.register
def _(value: Mapping, name: str) -> Facts:  # type: ignore[type-arg]
    if _is_plain(value.values()):
        yield name, _short(dict(value), len(value))
        return
    for key in value:
        yield from _facts(value[key], f"{name}.{key}")


@_facts.register(Sequence)
def _(value: Sequence[Any], name: str) -> Facts:
    if _is_plain(value):
        yield name, _short(value, len(value))
        return
    for index, part in enumerate(value):
        yield from _facts(part, f"{name}[{index}]")


@_facts.register(Set)
def _(value: Set[Any], name: str) -> Facts:
    yield name, _short(sorted(map(repr, value)), len(value))


def _is_plain(values: Iterable[Any]) -> bool:
    return all(_is_plain(v) if type(v) in (list, tuple) else type(v) in _PLAIN for v in values)


def _short(value: object, length: int) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST else f"{length} entries with checksum {zlib.crc32(text.encode()):08x}"
