"""`@checked`: makes a constructor refuse arguments that its annotations don't allow, with an error of one line.

    Every(steps="8", inner=Ring)   ->   ValueError: Every: steps must be a whole number, got '8': write steps=8

A component may be given by its name (`topology="ring"`); integers and lists of numpy, torch and Hydra become Python's.
Annotations are read at the first construction, a later one costs microseconds. The constructors check ranges.

An option may choose the class of the strategy (`StrategyType`), so that gossip and pipelines take options of packages
that they don't import:

    GossipStrategy(elastic=Elastic())    ->    Elastic().strategy(GossipStrategy)(elastic=Elastic())
"""

import functools
import inspect
from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from lightning_decentral.shared.plan.kinds import ArgumentKind, Mismatch, kind_of, meant

Class = TypeVar("Class", bound=type)
SHOWN = 80  # characters shown of a value


def checked(cls: Class) -> Class:
    """Make the class's constructor check its arguments. Write it above `@dataclass`, which makes the constructor."""
    made: Callable[..., None] = cls.__init__  # type: ignore[misc]

    @functools.wraps(made)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        constructor = constructor_of(cls, made)
        if unknown := [] if constructor.options is None else sorted(kwargs.keys() - constructor.options):
            raise ValueError(no_option(cls.__name__, unknown[0], constructor.options or ()))
        # Too many positional arguments are left to Python to refuse.
        args = (*map(constructor.one, constructor.places, args), *args[len(constructor.places) :])
        kwargs = {name: constructor.one(name, value) for name, value in kwargs.items()}
        made(self, *args, **kwargs)
        for name, value in (*zip(constructor.places, args, strict=False), *kwargs.items()):
            # NaN and infinity: checked after the constructor's own ranges, whose errors are better.
            if name in constructor.kinds and isinstance(value, float) and not isfinite(value):
                remedy = constructor.defaults.get(name, "give a finite one")
                raise ValueError(f"{constructor.owner}: {name} must be a finite number, got {value}: {remedy}")

    cls.__init__ = construct  # type: ignore[misc]
    return cls


@dataclass(frozen=True)
class Constructor:
    """Arguments that a constructor takes."""

    owner: str
    places: tuple[str, ...]  # names of the parameters that may be positional, in order
    kinds: Mapping[str, ArgumentKind]  # kinds of the parameters, by name
    defaults: Mapping[str, str]  # remedies that name the default, by name of the parameter
    options: frozenset[str] | None  # names of all parameters; None where the constructor passes others on

    def one(self, name: str, value: Any, place: str = "") -> Any:
        """Return the argument's value, converted; ValueError for a value of another kind. `place`: the argument's path
        in a configuration, for the message."""
        kind = self.kinds.get(name)
        if kind is None:
            return value
        try:
            return kind.taken(value)
        except Mismatch as mismatch:
            remedy = str(mismatch) or _rewritten(place or name, value, kind)
        if not remedy and (names := kind.names()):
            remedy = f"{meant(value, names)}use {'one of ' if len(names) > 1 else ''}{', '.join(names)}"
        title, remedy = place or f"{self.owner}: {name}", remedy or self.defaults.get(name) or f"give {kind.text}"
        raise ValueError(f"{title} must be {kind.text}, got {shown(value)}: {remedy}") from None


@functools.cache
def constructor_of(target: Any, made: Callable[..., Any]) -> Constructor:
    """Return the arguments of a class's constructor, with those of its bases where it passes options on. `target`: a
    class, or a function, which is its own constructor."""
    parameters = [p for p in inspect.signature(made).parameters.values() if p.name != "self"]
    own = {p.name: p for p in parameters}
    further = any(p.kind is p.VAR_KEYWORD for p in parameters)
    # Options passed on to the base's constructor have their annotations there.
    mro = reversed(getattr(target, "__mro__", ())) if further else ()
    bases = [vars(base)["__init__"] for base in mro if "__init__" in vars(base)]
    hints = {name: hint for init in (*bases, made) for name, hint in _hints(init).items()}
    named = {name for name in hints if further or name in own} - {"return"}
    places = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
    texts = {p.name: shown(p.default) for p in parameters if p.default is not p.empty}
    defaults = {n: f"leave it out for {'the default' if text.startswith('<') else text}" for n, text in texts.items()}
    kinds = {name: kind_of(hints[name]) for name in named}
    return Constructor(target.__name__, places, kinds, defaults, None if further else frozenset(own))


def _hints(init: Any) -> dict[str, Any]:
    try:
        return get_type_hints(init)
    except (NameError, TypeError, AttributeError):  # annotations of Lightning or torch, unreadable at run time
        return {}


def _rewritten(name: str, value: Any, kind: ArgumentKind) -> str:
    """Return a remedy with the number that was probably meant, 8 for '8' and 8.0, if the kind takes it; else empty."""
    for number in (int, float):
        try:
            meant = number(value)
            if not isinstance(value, bool) and meant == float(value):
                return f"write {name}={kind.taken(meant)!r}"
        except (TypeError, ValueError, OverflowError, RuntimeError):
            continue
    return ""


def no_option(owner: str, unknown: str, known: Collection[str], why: str = "") -> str:
    """Return the error text for an option that doesn't exist."""
    return f"{owner} has no option {unknown!r}{why}: {meant(unknown, known)}it has {', '.join(sorted(known)) or 'none'}"


def at_least(least: float, remedy: str, /, **numbers: float | None) -> None:
    """Raise ValueError, with the number's name, for a given number that is below `least` or NaN."""
    for name, value in numbers.items():
        if value is not None and not value >= least:
            raise ValueError(f"{name} must be at least {least}, got {value}: {remedy}")


def shown(value: Any) -> str:
    """Return the value's repr in one short line; of a class its name."""
    text = " ".join((value.__name__ if inspect.isclass(value) else repr(value)).split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def text_of(path: str | Path, remedy: str) -> str:
    """Read a UTF-8 text file, without a byte order mark. `remedy`: what to do instead, such as "give a trace".
    ValueError: the file can't be read, or isn't UTF-8."""
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"{path} can't be read ({error.strerror}): {remedy}") from None
    except UnicodeDecodeError as error:
        byte = f"byte {error.start + 1} is 0x{error.object[error.start]:02x}"
        raise ValueError(f"{path} is no UTF-8 text ({byte}): save it as UTF-8, or {remedy}") from None


class ChoosesStrategy(ABC):
    """Option that chooses the class of the strategy to which it is passed."""

    @abstractmethod
    def strategy(self, cls: type) -> type:
        """Return the class to construct: `cls`, or one with its constructor. ValueError: no option for `cls`."""


class Elasticity(ChoosesStrategy):
    """Option under which workers join and leave while training runs."""

    given_as = "Elastic"  # checks made by a layer above, which this module doesn't import


class StrategyType(ABCMeta):
    """Metaclass of strategies whose options may choose their class."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        made: type = cls
        for name, hint in _hints(inspect.unwrap(cls.__init__)).items():  # type: ignore[misc]
            kinds = [part for part in (hint, *get_args(hint)) if isinstance(part, type)]
            if isinstance(options.get(name), str) and any(issubclass(kind, ChoosesStrategy) for kind in kinds):
                with suppress(Mismatch):  # an option by name, as in the YAML files; a wrong one is refused later
                    options[name] = kind_of(hint).taken(options[name])
        for option in options.values():
            if isinstance(option, ChoosesStrategy):
                made = option.strategy(made)
        return type.__call__(made, *args, **options)

    @property
    def __signature__(cls) -> inspect.Signature:
        """Signature of the constructor, which `__call__` would hide from `inspect` and from command lines."""
        parameters = list(inspect.signature(cls.__init__).parameters.values())  # type: ignore[misc]
        return inspect.Signature(parameters[1:])
