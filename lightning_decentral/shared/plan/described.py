"""Describes an object as {dotted name: text} of all its constructor's arguments, so that two objects can be compared.

A new option is included without a list: fields of dataclasses are read, and of any other object the attributes named as
its constructor's arguments, or so behind an underscore."""

import inspect
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import fields, is_dataclass
from datetime import timedelta
from enum import Enum
from functools import partial
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np

LONGEST = 60  # Characters of a sequence that are shown; a longer sequence is shown as its length and a checksum.
DEEPEST = 12  # Depth of nested objects; anything deeper is a cycle.

Facts = Iterator[tuple[str, str]]


def described(value: object, name: str) -> dict[str, str]:
    """Return {name: text of the value, name.part: text of a part, ..}, in order: a class before its arguments."""
    return dict(_facts(value, name))


def constructed(value: object, within: Iterable[type], skip: Iterable[str] = ()) -> dict[str, Any]:
    """Return {argument name: the object's attribute of that name} for the constructors of these classes."""
    names: dict[str, None] = {}
    for cls in within:
        with suppress(ValueError, KeyError):  # a built-in class, or one without a constructor
            parameters = list(inspect.signature(vars(cls)["__init__"]).parameters.values())[1:]
            names |= {p.name: None for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    kept = {name: getattr(value, name, getattr(value, f"_{name}", _NOTHING)) for name in names}
    return {name: part for name, part in kept.items() if part is not _NOTHING and name not in skip}


_NOTHING = object()


def first_difference(mine: Mapping[str, str], theirs: Mapping[str, str], sign: str = "=") -> tuple[str, str] | None:
    """Return the first difference as (text of mine, text of theirs), `no name` for a missing one; None if equal."""
    name = next((name for name in (*theirs, *mine) if theirs.get(name) != mine.get(name)), None)
    if name is None:
        return None
    one, other = (f"{name}{sign}{facts[name]}" if name in facts else f"no {name}" for facts in (mine, theirs))
    return one, other


_PLAIN = (type(None), bool, int, float, complex, str, bytes, PurePath, timedelta, Enum)
_NAMED = (type, FunctionType, BuiltinFunctionType, MethodType)
_by_repr: list[type] = []


def describe_by_repr(*kinds: type) -> None:
    """Describe values of these classes, whose structure Python can't see, by their `repr`."""
    _by_repr.extend(kinds)


def _facts(value: Any, name: str) -> Facts:
    if (text := _text(value)) is not None:
        yield name, text
        return
    if isinstance(value, partial):
        parts = {"": value.func, ".args": value.args, ".keywords": value.keywords}
    elif isinstance(value, Mapping):
        parts = {f".{key}": value[key] for key in value}
    elif isinstance(value, Sequence):
        parts = {f"[{index}]": part for index, part in enumerate(value)}
    else:
        yield name, type(value).__qualname__
        own = {f.name: getattr(value, f.name) for f in fields(value)} if is_dataclass(value) else None
        own = constructed(value, type(value).__mro__[:-1]) if own is None else own
        parts = {f".{part}": own[part] for part in own}
    if name.count(".") < DEEPEST:
        for place, part in parts.items():
            yield from _facts(part, f"{name}{place}")


def _text(value: Any) -> str | None:
    """Return the text of a value without parts; None for a value with parts."""
    if isinstance(value, np.generic):
        return f"{type(value).__name__}({value})"  # numpy 1's repr leaves out the type
    if isinstance(value, (*_by_repr, *_PLAIN)):
        return repr(value)
    if isinstance(value, _NAMED):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, np.ndarray):
        return _short(value.tolist(), value.size)
    if isinstance(value, Set):
        return _short(sorted(map(repr, value)), len(value))
    if isinstance(value, Mapping):
        return _short(dict(value), len(value)) if _is_plain(value.values()) else None
    return _short(value, len(value)) if isinstance(value, Sequence) and _is_plain(value) else None


def _is_plain(values: Iterable[Any]) -> bool:
    return all(_is_plain(v) if type(v) in (list, tuple) else type(v) in _PLAIN for v in values)


def _short(value: object, length: int) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST else f"{length} entries with checksum {zlib.crc32(text.encode()):08x}"
