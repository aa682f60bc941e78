"""Checks values against annotations: a whole number, a name, a list, a part (`"ring"` for `Ring()`), with a remedy.

`kind_of(annotation)` reads the annotation once; `taken(value)` checks a value at every construction. Libraries don't
fit: beartype and pydantic's strict TypeAdapter refuse numbers of numpy and torch, Hydra's lists and parts by name;
beartype also refuses whole numbers for float, and takes True for 1; the other TypeAdapter takes "8" for 8. Each kind
below would be needed with them, too, for its text and conversion; and their import takes 0.06 s and more."""

import operator
import os
import re
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter, isabstract, isclass, signature
from typing import Any, Literal, SupportsFloat, SupportsIndex, Union, get_args, get_origin

import numpy as np

PACKAGE = __name__.partition(".")[0]
BOOLEANS = (bool, np.bool_)  # bool and complex are numbers to Python; nobody passes them as such


class Mismatch(ValueError):
    """Error: a value is not of the kind; its text is the remedy, empty where only the parameter's default is one."""


@dataclass(frozen=True)
class ArgumentKind:
    """Kind of values that an annotation allows."""

    text: str  # name of the kind, for the error
    taken: Callable[[Any], Any]  # converts a value for the constructor. Mismatch: it is of another kind
    names: Callable[[], list[str]] = list  # function that returns names of parts that may be given instead of a value


def kind_of(annotation: Any) -> ArgumentKind:
    """Return the kind of an annotation from `typing.get_type_hints`; any value is allowed where it can't be checked."""
    if annotation in PLAIN:
        return PLAIN[annotation]
    origin = get_origin(annotation)
    if origin in GENERIC:
        return GENERIC[origin](*get_args(annotation))
    names_a_class = isinstance(annotation, type) and origin is None  # on Python 3.10 dict[str, int] counts as a class
    if not names_a_class or annotation is object:
        return ArgumentKind("anything", lambda value: value)
    name = getattr(annotation, "given_as", annotation.__name__)  # the class that users write, where it has another name
    text = f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"
    return ArgumentKind(text, partial(_instance, annotation), lambda: sorted(_parts(annotation)))


def _plain(
    text: str, allows: Callable[[Any], bool], convert: Callable[[Any], Any] = lambda value: value
) -> ArgumentKind:
    def taken(value: Any) -> Any:
        if allows(value):
            with suppress(TypeError, ValueError, RuntimeError):  # a tensor of floats for an int, an array for a number
                return convert(value)
        raise Mismatch

    return ArgumentKind(text, taken)


def _is(*classes: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, classes) and not isinstance(value, BOOLEANS)


PLAIN: dict[Any, ArgumentKind] = {
    type(None): _plain("None", lambda value: value is None),
    bool: _plain("True or False", lambda value: isinstance(value, BOOLEANS), bool),
    int: _plain("a whole number", _is(SupportsIndex), operator.index),  # scalars of numpy and torch, too
    # Whole numbers stay ints. NaN and infinity are refused later: the constructor's range has the better error.
    float: _plain("a number", _is(SupportsFloat), lambda value: value if isinstance(value, int) else float(value)),
    str: _plain("a string", _is(str, os.PathLike), os.fspath),
}


def _literal(*choices: Any) -> ArgumentKind:
    def taken(value: Any) -> Any:
        for choice in choices:
            if type(value) is type(choice) and value == choice:
                return value
        raise Mismatch(f"use one of {', '.join(map(str, choices))}")

    return ArgumentKind(" or ".join(map(repr, choices)), taken)


def _list(item: Any, made: Callable[[Any], Any] = list) -> ArgumentKind:
    kind = kind_of(item)
    return ArgumentKind(f"a list, each item {kind.text}", partial(_items, made, kind))


def _tuple(*items: Any) -> ArgumentKind:
    if len(items) == 2 and items[1] is ...:
        return _list(items[0], tuple)
    if not items:  # `tuple[()]`, and `typing.Tuple`, whose items may be anything
        return _list(Any, tuple)
    kinds = [kind_of(item) for item in items]
    return ArgumentKind(f"a pair ({', '.join(kind.text for kind in kinds)})", partial(_items, tuple, kinds))


def _items(made: Callable[[Any], Any], kinds: ArgumentKind | Sequence[ArgumentKind], value: Any) -> Any:
    """Convert a list, Hydra's too: any number of items of one kind, or one item of each of these kinds."""
    if isinstance(value, str):
        item = kinds.taken(value) if isinstance(kinds, ArgumentKind) else value
        raise Mismatch(f"write {[item]!r}")
    if not isinstance(value, (Sequence, np.ndarray)) or isinstance(value, bytes):
        raise Mismatch
    each = (kinds,) * len(value) if isinstance(kinds, ArgumentKind) else kinds
    if len(value) != len(each):
        raise Mismatch
    found = []
    for kind, item in zip(each, value, strict=True):
        try:
            found.append(kind.taken(item))
        except Mismatch as mismatch:
            raise Mismatch(f"{item!r} is not {kind.text}{f', {mismatch}' if str(mismatch) else ''}") from None
    return made(found)


def _dict(key: Any, value: Any) -> ArgumentKind:
    """Return the kind of a dict; Hydra's mappings are converted."""
    keys, values = kind_of(key), kind_of(value)

    def taken(given: Any) -> Any:
        if not isinstance(given, Mapping):
            raise Mismatch
        return {keys.taken(name): values.taken(item) for name, item in given.items()}

    return ArgumentKind(f"a dict from {keys.text} to {values.text}", taken)


def _either(*annotations: Any) -> ArgumentKind:
    """Return the kind of a union, whose first kind that takes a value converts it."""
    kinds = [kind_of(annotation) for annotation in annotations]

    def taken(value: Any) -> Any:
        remedies = []
        for kind in kinds:
            try:
                return kind.taken(value)
            except Mismatch as mismatch:
                remedies.append(str(mismatch))
        raise Mismatch(next(filter(None, remedies), ""))

    text = " or ".join(kind.text for kind in kinds)
    return ArgumentKind(text, taken, lambda: sorted(name for kind in kinds for name in kind.names()))


GENERIC: dict[Any, Callable[..., ArgumentKind]] = {
    **dict.fromkeys((Union, types.UnionType), _either),
    **dict.fromkeys((Mapping, dict), _dict),
    **dict.fromkeys((Sequence, list), _list),
    # An iterable, which may be consumed only once: its items aren't checked.
    **dict.fromkeys(
        (Collection, Iterable),
        lambda item: _plain("a list", lambda value: _is(Iterable)(value) and not isinstance(value, str)),
    ),
    tuple: _tuple,
    Literal: _literal,
    Callable: lambda *signature: _plain("a function", callable),
}


def meant(name: object, names: Iterable[str]) -> str:
    """Return the beginning of a remedy: the name nearest to a misspelt one; empty where none is near."""
    close = get_close_matches(str(name).lower().replace("-", "_"), names, 1) if isinstance(name, str) else []
    return f"did you mean {close[0]!r}? " if close else ""


# ---- parts: instances of a class, or their names as in the YAML files ---------------------------------------------


def _instance(cls: type, value: Any) -> Any:
    """Return the instance, or make one of this package's parts from its name in snake case, with default arguments."""
    try:
        if isinstance(value, cls):
            return value
    except TypeError:  # a Protocol that doesn't support isinstance
        return value
    if isinstance(value, type) and get_origin(value) is None and issubclass(value, cls):
        raise Mismatch(f"write {value.__name__}()")
    if cls is timedelta and isinstance(value, (int, float)):
        raise Mismatch(f"write timedelta(seconds={value})")
    part = _parts(cls).get(value) if isinstance(value, str) else None
    if part is None:
        raise Mismatch
    needed = [p.name for p in signature(part).parameters.values() if p.default is Parameter.empty]
    if needed:
        raise Mismatch(f"write {part.__name__}({', '.join(f'{n}=...' for n in needed)})")
    try:
        return part()
    except ValueError as error:
        raise Mismatch(str(error)) from None


def _parts(part: type) -> dict[str, type]:
    """Return {name: class} of the subclasses of `part`, users' own included; none where it isn't of this package.

    The package's own class has precedence. OnePeerRing is one_peer_ring, TopK top_k, BFloat16 bfloat16, SRTF srtf."""
    if not part.__module__.startswith(f"{PACKAGE}."):
        return {}
    shown = _public()
    found: dict[str, type] = {}
    rest = [part]
    while rest:
        cls = rest.pop(0)
        rest = [*cls.__subclasses__(), *rest]
        theirs = not cls.__module__.startswith(f"{PACKAGE}.") and not cls.__name__.startswith("_")
        if not isabstract(cls) and (theirs or cls in shown):
            found.setdefault(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower(), cls)
    return found


def class_path(part: type, name: str) -> str | None:
    """Return the path of a part's class from its name in snake case or its class name; None if `part` isn't ours.
    Classes within functions have no path. ValueError: `part` has subclasses, but none of this name."""
    parts = {own: cls for own, cls in _parts(part).items() if "<locals>" not in cls.__qualname__}
    if not parts:
        return None
    cls = parts.get(name) or next((cls for cls in parts.values() if cls.__name__ == name), None)
    if cls is None:
        text, known = kind_of(part).text, sorted(parts)
        raise ValueError(f"{name!r} is not {text}: {meant(name, known)}use one of {', '.join(known)}")
    return f"{cls.__module__}.{cls.__qualname__}"


def _public() -> list[Any]:
    """Return the public names of the methods' packages, which import all parts (a pipeline's replicas may gossip)."""
    # From the mirror where this process has, or uses, `pytorch_lightning` alone, and not `lightning`.
    other = "pytorch_lightning" in sys.modules and "lightning" not in sys.modules
    package = import_module(f"{PACKAGE}.pytorch_lightning" if other or find_spec("lightning") is None else PACKAGE)
    strategies = filter(isclass, (getattr(package, name) for name in package.__all__))
    faces = [import_module(strategy.__module__.rpartition(".")[0]) for strategy in strategies]
    return [getattr(face, name) for face in faces for name in face.__all__]
