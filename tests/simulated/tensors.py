"""Tensors of the simulated device: what torch does with them is queued on the current stream."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from tests.simulated.memory import Block, is_pinned, poison, poisoned_like
from tests.simulated.streams import CUDA, Engine, Stream, the

READS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_consecutive"}
"""Operations whose result, or its shape, the host must see."""
MEMORY = {"empty_like", "new_empty", "empty", "empty_strided", "new_empty_strided"}
PUT_TOGETHER: dict[str, Callable[..., Any]] = {}
"""Of other operations, by "namespace::name", or what stands for them."""
OWN = {"block", "_inner", "_storage"}
move = Tensor.to


class Simulated(Tensor):
    """A tensor of the device."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    block: Block

    @staticmethod
    def __new__(cls, inner: Tensor, block: Block | None = None) -> "Simulated":
        like: dict[str, Any] = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, **like)  # type: ignore[attr-defined]

    def __init__(self, inner: Tensor, block: Block | None = None) -> None:
        self.block = block or Block(inner, the())
        self._inner, self._storage = inner, self.block.storage

    @property
    def inner(self) -> Tensor:
        """Its values, once the streams have come that far.

        Raises:
            RuntimeError: its memory was given back.
        """
        if self._storage is not self.block.storage:  # other memory since
            place = self.storage_offset(), self.size(), self.stride()
            self._inner = torch.empty(0, dtype=self.dtype).set_(self.block.storage, *place)  # type: ignore[call-overload]
            self._storage = self.block.storage
        return self._inner

    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    @property
    def data(self) -> "Simulated":  # type: ignore[override]
        return Simulated(self.inner, self.block)

    @data.setter
    def data(self, other: Tensor) -> None:
        if not isinstance(other, Simulated):
            become(self, other)
            return
        torch._C.TensorBase.data.__set__(self, other)
        self._inner, self.block, self._storage = other.inner, other.block, other.block.storage

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Simulated({self.inner})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "Simulated":
        """As torch's: tensors that shared memory share the copy's."""
        if id(self) in memo:
            return memo[id(self)]
        if id(self.block) not in memo:
            memo[id(self.block)] = self.set_(self.block).clone()
        whole = memo[id(self.block)]
        inner = torch.as_strided(whole.inner, self.size(), self.stride(), self.storage_offset())
        memo[id(self)] = copied = Simulated(inner, whole.block).requires_grad_(self.requires_grad)
        vars(copied).update({k: copy.deepcopy(v, memo) for k, v in vars(self).items() if k not in OWN})
        copied.grad = copy.deepcopy(self.grad, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().to("cpu").__reduce_ex__(protocol)  # where files are read to

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> Block:  # type: ignore[override]
        return self.block

    def set_(self, source: Block) -> "Simulated":  # type: ignore[override]
        """Another tensor of this type on the whole of a storage."""
        return Simulated(torch.empty(0, dtype=self.dtype).set_(source.storage), source)  # type: ignore[call-overload]

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
            return PUT_TOGETHER.get(func._schema.name, partial(_launch, func))(*args, **(kwargs or {}))


def become(tensor: Tensor, value: Tensor) -> None:
    """`tensor.data = value` between host and device, by which the very tensor, which others hold, changes its class."""
    other: Tensor = Simulated(value.inner, value.block) if isinstance(value, Simulated) else value.detach()
    if isinstance(tensor, nn.Parameter):
        other = nn.Parameter(other)
    other.requires_grad_(tensor.requires_grad)
    vars(other).update({name: kept for name, kept in vars(tensor).items() if name not in {*OWN, "_is_param"}})
    if hooks := tensor._post_accumulate_grad_hooks:  # type: ignore[attr-defined]
        other._post_accumulate_grad_hooks = hooks  # type: ignore[attr-defined]
    torch.utils.swap_tensors(tensor, other)


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


def _launch(func: Any, *args: Any, **kwargs: Any) -> Any:
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
    return poisoned_like(like.inner if isinstance(like, Simulated) else like, dtype)
