"""Parts by their names: `topology="ring"` is `topology=Ring()`, as in the YAML files: the class in snake case."""

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter, isabstract, isclass, signature
from typing import Any

PACKAGE = __name__.partition(".")[0]


def snake(name: str) -> str:
    """OnePeerRing -> one_peer_ring, TopK -> top_k, BFloat16 -> bfloat16, SRTF -> srtf"""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def known(part: type) -> list[str]:
    """Names of the parts that are a `part`, users' own included; none where it isn't of this package."""
    return sorted(_classes(part))


def named(part: type, name: str) -> Any:
    """The part of this name, with its defaults.

    Raises:
        ValueError: it has no default for something; KeyError: unknown.
    """
    cls = _classes(part)[name]
    needed = [p.name for p in signature(cls).parameters.values() if p.default is Parameter.empty]
    if needed:
        raise ValueError(f"write {cls.__name__}({', '.join(f'{n}=...' for n in needed)})")
    return cls()


def _classes(part: type) -> dict[str, type]:
    """{name: class}; the package's own first."""
    if not part.__module__.startswith(f"{PACKAGE}."):
        return {}
    _load()
    found: dict[str, type] = {}
    for cls in _below(part):
        if not isabstract(cls) and not cls.__name__.startswith("_"):
            found.setdefault(snake(cls.__name__), cls)
    return found


def _below(part: type) -> Iterator[type]:
    yield part
    below: list[type] = part.__subclasses__()
    for cls in below:
        yield from _below(cls)


def _load() -> None:
    """Read the faces of the methods: which parts there are, and a pipeline's replicas may gossip."""
    package = import_module(_binding())
    for strategy in filter(isclass, (getattr(package, name) for name in package.__all__)):
        face = import_module(strategy.__module__.rpartition(".")[0])
        for name in face.__all__:
            getattr(face, name)


def _binding() -> str:
    """Package whose strategies this process can read: those of `lightning`, unless it has or uses another alone."""
    other = "pytorch_lightning" in sys.modules and "lightning" not in sys.modules
    return f"{PACKAGE}.pytorch_lightning" if other or find_spec("lightning") is None else PACKAGE
