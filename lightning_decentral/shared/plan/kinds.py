"""Kinds of values that annotations ask for: a whole number, a number, a name, a list, a part; and the remedy.

`kind_of(annotation)` reads the annotation once; `taken(value)` is asked at every construction.
"""

import operator
import os
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, SupportsFloat, SupportsIndex, Union, get_args, get_origin

import numpy as np

from lightning_decentral.shared.plan.names import known, named

TRUTHS = (bool, np.bool_)  # numbers to Python, but nobody means them so


class Mismatch(ValueError):
    """The value is not of the kind; the text is the remedy, empty where only the parameter's default is one."""


class Kind(ABC):
    """One annotation."""

    text: str

    @property
    def names(self) -> list[str]:
        """Names of the parts that may be given."""
        return []

    @abstractmethod
    def taken(self, value: Any) -> Any:
        """The value as the constructor gets it. Mismatch where it is of another kind."""


class Anything(Kind):
    """Any, and what can't be asked."""

    text = "anything"

    def taken(self, value: Any) -> Any:
        return value


class Nothing(Kind):
    """None."""

    text = "None"

    def taken(self, value: Any) -> Any:
        if value is None:
            return value
        raise Mismatch


class Truth(Kind):
    """bool."""

    text = "True or False"

    def taken(self, value: Any) -> Any:
        if isinstance(value, TRUTHS):
            return bool(value)
        raise Mismatch


class Whole(Kind):
    """Integers of numpy and torch, too."""

    text = "a whole number"

    def taken(self, value: Any) -> Any:
        if isinstance(value, SupportsIndex) and not isinstance(value, TRUTHS):
            try:
                return operator.index(value)
            except TypeError:  # a tensor of floats
                raise Mismatch from None
        raise Mismatch


class Number(Kind):
    """Number, kept whole if whole. What isn't finite is refused later: the constructor's range has the better error."""

    text = "a number"

    def taken(self, value: Any) -> Any:
        if not isinstance(value, SupportsFloat) or isinstance(value, TRUTHS):
            raise Mismatch
        try:
            return value if isinstance(value, int) else float(value)
        except (TypeError, ValueError, RuntimeError):  # several numbers in one array
            raise Mismatch from None


class Text(Kind):
    """Paths, too."""

    text = "a string"

    def taken(self, value: Any) -> Any:
        if isinstance(value, (str, os.PathLike)):
            return os.fspath(value)
        raise Mismatch


class Function(Kind):
    """Callable."""

    text = "a function"

    def taken(self, value: Any) -> Any:
        if callable(value):
            return value
        raise Mismatch


@dataclass(frozen=True)
class Choice(Kind):
    """Literal."""

    choices: tuple[Any, ...]

    @property
    def text(self) -> str:  # type: ignore[override]
        return " or ".join(map(repr, self.choices))

    def taken(self, value: Any) -> Any:
        for choice in self.choices:
            if type(value) is type(choice) and value == choice:
                return value
        raise Mismatch(f"use one of {', '.join(map(str, self.choices))}")


@dataclass(frozen=True)
class Of(Kind):
    """Instances of a class; for a part of this package its name in snake case, too: with the class's defaults."""

    cls: type

    @property
    def text(self) -> str:  # type: ignore[override]
        return f"{'an' if self.cls.__name__[0] in 'AEIOU' else 'a'} {self.cls.__name__}"

    @property
    def names(self) -> list[str]:
        return known(self.cls)

    def taken(self, value: Any) -> Any:
        try:
            if isinstance(value, self.cls):
                return value
        except TypeError:  # a Protocol that isn't made for this question
            return value
        if isinstance(value, type) and get_origin(value) is None and issubclass(value, self.cls):
            raise Mismatch(f"write {value.__name__}()")
        return self._named(value)

    def _named(self, value: Any) -> Any:
        if self.cls is timedelta and isinstance(value, (int, float)):
            raise Mismatch(f"write timedelta(seconds={value})")
        if isinstance(value, str) and value in self.names:
            try:
                return named(self.cls, value)
            except ValueError as error:
                raise Mismatch(str(error)) from None
        raise Mismatch


@dataclass(frozen=True)
class Items(Kind):
    """Any number of items of one kind, or so many of these kinds; Hydra's lists, too."""

    made: Callable[[Iterable[Any]], Any]
    item: Kind
    each: tuple[Kind, ...] = ()

    @property
    def text(self) -> str:  # type: ignore[override]
        kinds = [kind.text for kind in self.each]
        return f"a pair ({', '.join(kinds)})" if kinds else f"a list, each item {self.item.text}"

    def taken(self, value: Any) -> Any:
        if isinstance(value, str):
            raise Mismatch(f"write {[self.item.taken(value)]!r}")
        if not isinstance(value, (Sequence, np.ndarray)) or isinstance(value, bytes):
            raise Mismatch
        if self.each and len(value) != len(self.each):
            raise Mismatch
        kinds = self.each or (self.item,) * len(value)
        return self.made(_item(kind, item) for kind, item in zip(kinds, value, strict=True))


def _item(kind: Kind, item: Any) -> Any:
    try:
        return kind.taken(item)
    except Mismatch as mismatch:
        raise Mismatch(f"{item!r} is not {kind.text}{f', {mismatch}' if str(mismatch) else ''}") from None


class Loop(Kind):
    """Something to go through, once perhaps: its items are not looked at."""

    text = "a list"

    def taken(self, value: Any) -> Any:
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise Mismatch
        return value


@dataclass(frozen=True)
class Table(Kind):
    """A mapping; Hydra's, too."""

    key: Kind
    value: Kind

    @property
    def text(self) -> str:  # type: ignore[override]
        return f"a dict from {self.key.text} to {self.value.text}"

    def taken(self, value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise Mismatch
        return {self.key.taken(key): self.value.taken(item) for key, item in value.items()}


@dataclass(frozen=True)
class Either(Kind):
    """The first kind that takes the value."""

    kinds: tuple[Kind, ...]

    @property
    def text(self) -> str:  # type: ignore[override]
        return " or ".join(kind.text for kind in self.kinds)

    @property
    def names(self) -> list[str]:
        return sorted(name for kind in self.kinds for name in kind.names)

    def taken(self, value: Any) -> Any:
        remedies = []
        for kind in self.kinds:
            try:
                return kind.taken(value)
            except Mismatch as mismatch:
                remedies.append(str(mismatch))
        raise Mismatch(next(filter(None, remedies), ""))


PLAIN: dict[Any, type[Kind]] = {type(None): Nothing, bool: Truth, int: Whole, float: Number, str: Text}


def kind_of(annotation: Any) -> Kind:
    """Kind of what `typing.get_type_hints` gives; anything goes where the annotation has nothing to check by."""
    if annotation in PLAIN:
        return PLAIN[annotation]()
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return Either(tuple(map(kind_of, arguments)))
    if origin is Literal:
        return Choice(arguments)
    if origin is tuple:
        return _tuple(arguments)
    if origin in READERS:
        return READERS[origin](*map(kind_of, arguments)) if origin is not Callable else Function()
    names_a_class = isinstance(annotation, type) and origin is None  # Python 3.10 takes dict[str, int] for one
    return Of(annotation) if names_a_class and annotation is not object else Anything()


def _tuple(arguments: tuple[Any, ...]) -> Kind:
    if len(arguments) == 2 and arguments[1] is ...:
        return Items(tuple, kind_of(arguments[0]))
    return Items(tuple, Anything(), tuple(map(kind_of, arguments)))


def _list(item: Kind) -> Kind:
    return Items(list, item)


READERS: dict[Any, Callable[..., Kind]] = {
    Sequence: _list,
    list: _list,
    Collection: lambda item: Loop(),
    Iterable: lambda item: Loop(),
    Mapping: Table,
    dict: Table,
    Callable: Function,
}
