"""Tensors of the simulated device: what torch does with them is queued on the current stream."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from tests.simulated.streams import CUDA, Engine, Mark, Stream, the

READS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_consecutive"}
"""Operations whose result, or its shape, the host must see."""
MEMORY = {"empty_like", "new_empty", "empty", "empty_strided", "new_empty_strided"}
move = Tensor.to


class Block:
    """Memory. It goes back where the last tensor on it dies, and is poisoned as soon as its stream gets there."""

    def __init__(self, inner: Tensor, engine: Engine) -> None:
        self.readers: set[Stream] = set()
        engine.takes(inner.untyped_storage().nbytes())
        weakref.finalize(self, _give_back, inner.untyped_storage(), inner.dtype, engine.current, self.readers)


def _give_back(storage: torch.UntypedStorage, dtype: torch.dtype, stream: Stream, readers: set[Stream]) -> None:
    marks = []
    stream.engine.takes(-storage.nbytes())
    for reader in readers - {stream}:
        reader.then((mark := Mark()).pass_)
        marks.append(mark)

    def reuse() -> None:
        stream.then(lambda: poison(torch.empty(0, dtype=dtype).set_(storage), stream.engine))  # type: ignore[call-overload]

    if marks:  # as the allocator does: nobody waits, the memory is used again when it has seen that all have passed
        stream.engine.kept.append((marks, reuse))
    else:
        reuse()


def poison(tensor: Tensor, engine: Engine) -> Tensor:
    """Values that no test expects."""
    if tensor.dtype == torch.bool:
        return tensor.fill_(engine.random.random() < 0.5)
    return tensor.fill_(float("nan") if tensor.is_floating_point() or tensor.is_complex() else 99)


class Simulated(Tensor):
    """A tensor of the device. `inner` holds its values, once the streams have come that far."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    inner: Tensor
    block: Block

    @staticmethod
    def __new__(cls, inner: Tensor, block: Block | None = None) -> "Simulated":
        like: dict[str, Any] = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, **like)  # type: ignore[attr-defined]

    def __init__(self, inner: Tensor, block: Block | None = None) -> None:
        self.inner, self.block = inner, block or Block(inner, the())

    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    @property
    def data(self) -> "Simulated":  # type: ignore[override]
        return Simulated(self.inner, self.block)

    @data.setter
    def data(self, other: "Simulated") -> None:
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.inner, self.block = other.inner, other.block

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Simulated({self.inner})"

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def is_pinned(self, *_: Any) -> bool:  # type: ignore[override]
        return False

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        self.block.readers.add(stream)

    def cpu(self) -> Tensor:  # type: ignore[override]
        return self.to("cpu")

    def tolist(self) -> Any:
        return self.detach().to("cpu").tolist()

    def numpy(self, **_: Any) -> Any:  # type: ignore[override]
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def cuda(self, *_: Any, **__: Any) -> "Simulated":  # type: ignore[override]
        return self

    def to(self, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        where, dtype, late = target(self, *args, **kwargs)
        if where.type == "cuda":
            return move(self, dtype, copy=bool(kwargs.get("copy")))
        here = host_like(self.detach(), dtype=dtype) if late else torch.empty_like(self.inner, dtype=dtype)
        return here.copy_(self.detach().to(dtype), non_blocking=late)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return _launch(func, args, kwargs or {})


def target(tensor: Tensor, *args: Any, **kwargs: Any) -> tuple[torch.device, torch.dtype, bool]:
    """(device, type, whether nobody waits) that `Tensor.to` is asked for."""
    kwargs.pop("copy", None)
    other = args[0] if args and isinstance(args[0], Tensor) else kwargs.pop("other", None)
    if other is not None:
        args = other.device, other.dtype, *args[1:]
    with torch._C.DisableTorchFunction():
        device, dtype, late, _ = torch._C._nn._parse_to(*args, **kwargs)
    return device or tensor.device, dtype or tensor.dtype, late


@dataclass(frozen=True)
class Kind:
    """What an operation's schema says of it.

    Attributes:
        written: (place, name) of the arguments that it changes.
    """

    name: str
    written: tuple[tuple[int, str], ...]
    returned: int
    views: bool
    draws: bool


@cache
def _kind(func: Any) -> Kind:
    arguments, returns = func._schema.arguments, func._schema.returns
    return Kind(
        func.overloadpacket.__name__,
        tuple((i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write),
        len(returns),
        any(r.alias_info is not None for r in returns),
        torch.Tag.nondeterministic_seeded in func.tags,
    )


def _launch(func: Any, args: Any, kwargs: Any) -> Any:
    engine: Engine = the()
    kind = _kind(func)
    leaves, tree = tree_flatten((args, kwargs))
    changed = [args[i] if i < len(args) else kwargs.get(name) for i, name in kind.written]
    written = [argument for argument in changed if argument is not None]
    _check_devices(kind.name, [t for t in leaves if isinstance(t, Tensor)], written)
    if kind.name == "copy_" and not isinstance(args[0], Simulated):
        return _to_host(engine, *args, **kwargs)
    if kind.name == "copy_" and not isinstance(args[1], Simulated) and args[1].dim():
        return _to_device(engine, *args, **kwargs)
    bare = [_bare(leaf) for leaf in leaves]
    given_args, given_kwargs = tree_unflatten(bare, tree)
    run = partial(func, *given_args, **given_kwargs)
    if kind.name == "_fused_sdp_choice":  # of sizes alone; else attention would make its mask on the host
        return run()
    if kind.name in READS or (kind.name.startswith("index") and _host_sees(args)):
        engine.host_waits(kind.name)
        return tree_map_only(Tensor, Simulated, run())
    if written:
        engine.current.then(run)
        returned = written[: kind.returned]
        return returned[0] if len(returned) == 1 else tuple(returned) or None
    if kind.views:
        source = next(t for t in leaves if isinstance(t, Simulated))
        return tree_map_only(Tensor, lambda t: Simulated(t, source.block), run())
    made = tree_map_only(Shape, lambda shape: poison(shape.empty(), engine), _shapes(func, bare, tree))
    if kind.name not in MEMORY:
        engine.current.then(
            partial(_compute, run, _tensors(made), engine.random.getrandbits(31) if kind.draws else None)
        )
    return tree_map_only(Tensor, Simulated, made)


def _bare(leaf: Any) -> Any:
    """A tensor's values; a number of the host is read now, whatever becomes of it."""
    if isinstance(leaf, Simulated):
        return leaf.inner
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _compute(run: Callable[[], Any], made: Sequence[Tensor], seed: int | None) -> None:
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        found = run()
    for out, value in zip(made, _tensors(found), strict=True):
        out.copy_(value)


@dataclass(frozen=True)
class Shape:
    """Of a tensor that an operation makes."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def empty(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype)


_seen: dict[Any, Any] = {}


def _shapes(func: Any, leaves: Sequence[Any], tree: Any) -> Any:
    """What it returns, with a `Shape` for each tensor: asked of torch once for equal arguments."""
    key = func, str(tree), *(Shape(t.size(), t.stride(), t.dtype) if isinstance(t, Tensor) else str(t) for t in leaves)
    if key not in _seen:
        args, kwargs = tree_unflatten([t.to("meta") if isinstance(t, Tensor) else t for t in leaves], tree)
        if "device" in kwargs:
            kwargs["device"] = "meta"
        _seen[key] = tree_map_only(Tensor, lambda t: Shape(t.size(), t.stride(), t.dtype), func(*args, **kwargs))
    return _seen[key]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _host_sees(args: Any) -> bool:
    """An index by a mask has a shape that depends on it; one of the host must be copied first."""
    indices = [i for i in tree_leaves(args[1]) if isinstance(i, Tensor)] if len(args) > 1 else []
    return any(i.dtype in (torch.bool, torch.uint8) or (not isinstance(i, Simulated) and i.dim()) for i in indices)


def _check_devices(name: str, tensors: list[Tensor], written: list[Any]) -> None:
    """A device takes single numbers of the host, where it computes with them, and nothing else."""
    if name == "copy_" or name.startswith("index"):
        return
    joined = name in {"cat", "stack"}
    strangers = [t for t in tensors if not isinstance(t, Simulated) and (t.dim() or joined)]
    if strangers or any(isinstance(t, Tensor) and not isinstance(t, Simulated) for t in written):
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, found cuda:0 and cpu")


def _to_host(engine: Engine, target: Tensor, source: Simulated, late: bool = False, **kwargs: Any) -> Tensor:
    inner, late = source.inner, late or bool(kwargs.get("non_blocking"))
    engine.current.then(lambda: target.copy_(inner))
    if not (late and is_pinned(target)):
        engine.host_waits("copy to the host")
    return target


def _to_device(engine: Engine, target: Simulated, source: Tensor, late: bool = False, **kwargs: Any) -> Simulated:
    inner, late = target.inner, late or bool(kwargs.get("non_blocking"))
    # Pinned memory is read when its turn has come, other memory before the call returns.
    read = source if is_pinned(source) else source.clone()
    engine.current.then(lambda: inner.copy_(read))
    if not late:
        engine.host_waits("copy to the device")
    return target


def host_like(like: Tensor, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
    like = like.inner if isinstance(like, Simulated) else like
    with _disable_current_modes():
        return pin(poison(torch.empty_like(like, dtype=dtype, requires_grad=False), the()))


def pin(tensor: Tensor) -> Tensor:
    the().pinned[tensor.untyped_storage().data_ptr()] = tensor
    return tensor


def is_pinned(tensor: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() in the().pinned


def pinned(tensor: Tensor) -> Tensor:
    return tensor if is_pinned(tensor) else pin(tensor.clone())
