"""Classes that a module exports, as tests go through them: a new one takes part by being there."""

import inspect
from types import ModuleType
from typing import get_origin


def concrete(face: ModuleType, kind: type | tuple[type, ...] = object) -> list[type]:
    """In the order of `__all__`, or of a module without one; `kind` itself is left out."""
    found = [getattr(face, name) for name in getattr(face, "__all__", vars(face))]
    # Python 3.10 takes dict[str, int] for a class.
    classes = [c for c in found if isinstance(c, type) and get_origin(c) is None and c is not kind]
    return [c for c in classes if issubclass(c, kind) and not inspect.isabstract(c)]
