"""Serialization as JSON and raw bytes: values received from another worker have known classes, and are never executed.

A serialized value is a head, JSON with its structure, and the bytes of its tensors, which aren't copied until they are
sent. JSON's own types stand for themselves; everything else is {kind: parts}."""

import base64
import builtins
import json
import os
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

PACKAGE = "lightning_decentral"
AS_THEY_ARE = (type(None), bool, int, float, str)


class Serialized(NamedTuple):
    """Serialized value: a JSON head and tensors of bytes."""

    head: bytes
    payload: list[Tensor]  # [bytes of a tensor] each, on the CPU


class NotPlain(TypeError):
    """Error: a value can't be sent; the text has its class and its path in the whole value."""


@dataclass(frozen=True)
class Serializer:
    """Serializes values of a class: `parts` splits a value into plain values, `build` rebuilds the value."""

    name: str
    parts: Callable[[Any], Any]
    build: Callable[[Any], Any]


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch has no type {name}")
    return found


_PATH = Serializer("path", os.fspath, Path)
_SCALAR = Serializer(
    "scalar", lambda v: [v.dtype.str, v.tobytes()], lambda parts: np.frombuffer(parts[1], dtype=np.dtype(parts[0]))[0]
)
SERIALIZERS: dict[type, Serializer] = {
    tuple: Serializer("tuple", list, tuple),
    set: Serializer("set", list, set),
    frozenset: Serializer("frozenset", list, frozenset),
    dict: Serializer("dict", lambda v: [list(item) for item in v.items()], dict),
    OrderedDict: Serializer("ordered", lambda v: [list(item) for item in v.items()], OrderedDict),
    bytes: Serializer("bytes", lambda v: base64.b64encode(v).decode(), lambda v: base64.b64decode(v, validate=True)),
    complex: Serializer("complex", lambda v: [v.real, v.imag], lambda v: complex(*v)),
    timedelta: Serializer("timedelta", lambda v: [v.days, v.seconds, v.microseconds], lambda v: timedelta(*v)),
    torch.Size: Serializer("size", list, torch.Size),
    torch.dtype: Serializer("dtype", lambda v: str(v).removeprefix("torch."), _dtype),
    torch.device: Serializer("device", str, torch.device),
    type(Path()): _PATH,
}
_KINDS = {kind.name: kind for kind in (*SERIALIZERS.values(), _SCALAR)}
# Values that a call of `self.log` may contain.
_FUNCTIONS: dict[str, Any] = {f"torch.{n}": getattr(torch, n) for n in ("mean", "sum", "min", "max", "nansum")}
_FUNCTIONS |= {n: getattr(builtins, n) for n in ("min", "max", "sum")}
_NAMES = {function: name for name, function in _FUNCTIONS.items()}
_OF_FUNCTIONS = set(map(type, _NAMES))


def pack(value: object) -> Serialized:
    """Serialize the value to a head and a payload. NotPlain: a part of the value has none of the known classes."""
    payload: list[Tensor] = []
    tree = _down(value, "it", payload)
    return Serialized(json.dumps({"value": tree, "bytes": [len(p) for p in payload]}).encode(), payload)


def lengths(head: bytes) -> list[int]:
    """Return the bytes of each tensor behind a head."""
    try:
        found = json.loads(head)["bytes"]
        if all(type(n) is int and n >= 0 for n in found):
            return list(found)
    except Exception as error:
        raise _unreadable(error) from error
    raise _unreadable("lengths")


def unpack(packed: Serialized) -> Any:
    """Rebuild the value, with tensors on the CPU. ValueError: `pack` didn't make it."""
    try:
        return _up(json.loads(packed.head)["value"], packed.payload)
    except Exception as error:
        raise _unreadable(error) from error


def _unreadable(why: object) -> ValueError:
    return ValueError(f"a value from another worker can't be read ({why}): give every worker the same version")


def _down(value: Any, where: str, payload: list[Tensor]) -> Any:
    kind = type(value)
    if kind in AS_THEY_ARE:
        return value
    if kind is list:
        return [_down(part, f"{where}[{i}]", payload) for i, part in enumerate(value)]
    if kind in SERIALIZERS:
        return {SERIALIZERS[kind].name: _down(SERIALIZERS[kind].parts(value), where, payload)}
    if kind in (Tensor, nn.Parameter):
        return {"tensor": _tensor(value.detach(), where, payload)}
    if kind is np.ndarray and value.dtype.kind in "biufc":
        shape = list(value.shape)  # as bytes: torch doesn't have all of numpy's types
        payload.append(torch.from_numpy(np.frombuffer(bytearray(value.tobytes()), dtype=np.uint8)))
        return {"array": [value.dtype.str, shape, len(payload) - 1]}
    if issubclass(kind, np.generic) and value.dtype.kind in "biufc":
        return {_SCALAR.name: _down(_SCALAR.parts(value), where, payload)}
    if kind in _OF_FUNCTIONS and value in _NAMES:
        return {"function": _NAMES[value]}
    return _record(value, kind, where, payload)


def _tensor(value: Tensor, where: str, payload: list[Tensor]) -> list[Any]:
    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        raise NotPlain(f"{where} is a tensor without plain values ({value.layout}, {value.device}): send its values")
    flat = value.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    payload.append(flat)
    return [str(value.dtype).removeprefix("torch."), list(value.shape), len(payload) - 1]


def _record(value: Any, kind: type, where: str, payload: list[Tensor]) -> dict[str, Any]:
    """Serialize a dataclass, a named tuple or a member of an enumeration of this package."""
    if kind.__module__.partition(".")[0] == PACKAGE:
        place = [kind.__module__, kind.__qualname__]
        if isinstance(value, Enum):
            return {"member": [*place, value.name]}
        names = _fields(kind)
        if names is not None:
            return {"record": [*place, {n: _down(getattr(value, n), f"{where}.{n}", payload) for n in names}]}
    raise NotPlain(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which isn't sent between workers: send numbers, strings, "
        "paths, tensors, or lists, tuples and dicts of these"
    )


def _fields(kind: Any) -> list[str] | None:
    if is_dataclass(kind):
        return [f.name for f in fields(kind) if f.init]
    return list(kind._fields) if issubclass(kind, tuple) and "_fields" in vars(kind) else None


def _up(node: Any, payload: list[Tensor]) -> Any:
    if type(node) in AS_THEY_ARE:
        return node
    if type(node) is list:
        return [_up(part, payload) for part in node]
    ((name, parts),) = node.items()
    if name in _KINDS:
        return _KINDS[name].build(_up(parts, payload))
    if name == "function":
        return _FUNCTIONS[parts]
    first, second, last = parts
    if name in ("tensor", "array"):  # (type, shape, index in the payload)
        data = payload[last]
        return (data.view(_dtype(first)) if name == "tensor" else data.numpy().view(np.dtype(first))).reshape(second)
    kind = _own_class(first, second)
    if name == "member" and issubclass(kind, Enum):
        return kind[last]
    if name != "record" or set(last) != set(_fields(kind) or ()):
        raise ValueError(f"{kind.__qualname__} has no {name}, or other fields")
    return kind(**{name: _up(value, payload) for name, value in last.items()})


def _own_class(module: str, name: str) -> Any:
    """Return a class of this package that is loaded already: nothing is imported because a message names it."""
    found = vars(sys.modules[module]).get(name) if module.partition(".")[0] == PACKAGE else None
    if not isinstance(found, type) or found.__module__ != module:
        raise ValueError(f"{module} has no class {name}")
    return found
