"""Deferred initialization: build a model without memory, then give each stage the values of its part.

Within `Deferred` a new tensor gets no storage. Operations on it are recorded, with the random generator's state where
they draw. `made` repeats the recorded operations for one tensor, so at most one more tensor than wanted is in
memory."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

Key = int
COPIED_BYTES = 2**16
READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)  # `.item()`, `equal`


@dataclass(frozen=True)
class _View:
    """Storage, place and dtype of a tensor when an operation used it: `tensor.data = ..` may change them later."""

    storage: Any  # a reference, so that its key isn't used again
    place: tuple[Any, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "_View":
        return cls(tensor.untyped_storage(), _place(tensor), tensor.dtype)

    @property
    def key(self) -> Key:
        return int(self.storage._cdata)

    def real(self, storages: Mapping[Key, Tensor]) -> Tensor:
        """Make the same view of the storage, which has memory by now."""
        return torch.empty(0, dtype=self.dtype).set_(storages[self.key].untyped_storage(), *self.place)


@dataclass(frozen=True)
class _Given:
    """Tensor with memory that an operation was given: a copy, or the tensor itself if it's large."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> "_Given":
        # Other code may write to the tensor before it's read: small tensors are copied, changed large ones refused.
        own = tensor.detach().clone() if tensor.nbytes <= COPIED_BYTES else tensor
        return cls(own, own._version)

    def real(self, storages: Mapping[Key, Tensor]) -> Tensor:
        if self.tensor._version != self.version:
            raise ValueError(
                f"a tensor of shape {tuple(self.tensor.shape)} was copied into the model and changed later, before "
                "the model had memory: change a clone of the tensor instead"
            )
        return self.tensor


@dataclass(frozen=True)
class _Done:
    """Recorded operation: its arguments, its results, and the generator's state if it drew random numbers."""

    function: Any
    given: tuple[tuple[Any, ...], dict[str, Any]]
    result: Any
    state: Tensor | None
    default: torch.dtype  # torch's at that time, which tensors without an explicit dtype get

    def touched(self) -> set[Key]:
        """Storages that the operation read or wrote."""
        return {leaf.key for leaf in tree_leaves((self.given, self.result)) if isinstance(leaf, _View)}

    def repeat(self, storages: dict[Key, Tensor]) -> None:
        """Run the operation again with real tensors, drawing the same random numbers."""
        args, kwargs = tree_map_only((_View, _Given), lambda leaf: leaf.real(storages), self.given)
        generator = _generator(args, kwargs)
        before = generator.get_state()
        if self.state is not None:
            generator.set_state(self.state)
        default = torch.get_default_dtype()
        torch.set_default_dtype(self.default)
        try:
            found = tree_leaves(self.function(*args, **kwargs))
        finally:
            torch.set_default_dtype(default)
        generator.set_state(before)  # later random draws don't depend on the repetition
        for mine, view in zip(found, tree_leaves(self.result), strict=True):
            if isinstance(view, _View) and view.key not in storages:
                assert (mine.dtype, *_place(mine)) == (view.dtype, *view.place), f"{self.function} made another tensor"
                storages[view.key] = mine


class _Unnoticed(TorchFunctionMode):
    """Mode in which `is_meta` is False: `trunc_normal_` and others would skip their work on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False
        return func(*args, **(kwargs or {}))


class Deferred(TorchDispatchMode):
    """Context in which new tensors are made on the meta device and operations on them are recorded."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._unnoticed = _Unnoticed()
        self._done: list[_Done] = []
        self._of: dict[Key, list[int]] = defaultdict(list)

    def again(self) -> AbstractContextManager[Any]:
        """Record later operations on deferred tensors in this context; does nothing if there are no such tensors."""
        return self if self._done else nullcontext()

    def __enter__(self) -> "Deferred":
        self._unnoticed.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._unnoticed.__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if given and not _metas(given):
            return func(*args, **kwargs)
        leaves = func is torch.ops.aten._to_copy.default and torch.device(kwargs.get("device") or "meta").type != "meta"
        # The operation needs values, as a copy to a real device does, or writes to a tensor that has memory.
        if leaves or func in READS or len(written := _written(func, args, kwargs)) > len(_metas(written)):
            args, kwargs = tree_map_only(Tensor, self.made, (args, kwargs))
            return func(*args, **kwargs)
        drawn = torch.Tag.nondeterministic_seeded in func.tags
        state = _generator(args, kwargs).get_state() if drawn else None
        makes = not given and any(argument.name == "device" for argument in func._schema.arguments)
        on_meta = {**kwargs, "device": torch.device("meta")} if makes else kwargs
        result = self._draw(func, args, kwargs) if drawn else func(*args, **on_meta)
        done = _Done(func, _views((args, kwargs)), _views(result), state, torch.get_default_dtype())
        for key in done.touched():
            self._of[key].append(len(self._done))
        self._done.append(done)
        return result

    def _draw(self, function: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Draw random numbers into temporary memory, so that the generator's state advances as usual."""
        # Tensors that are only read (means, rates) have their values: some draws take more or fewer numbers for others.
        blank: dict[int, Tensor] = {}
        for t in _metas(_written(function, args, kwargs)):
            # Memory of the same layout: how many numbers a draw takes depends on it.
            memory = torch.empty(t.untyped_storage().nbytes(), dtype=torch.uint8)
            blank[id(t)] = torch.empty(0, dtype=t.dtype).set_(memory.untyped_storage(), *_place(t))
        stand_in = lambda t: blank[id(t)] if id(t) in blank else self.made(t)  # noqa: E731
        drawn = function(*tree_map_only(Tensor, stand_in, args), **tree_map_only(Tensor, stand_in, dict(kwargs)))
        own = {id(blank[id(t)]): t for t in _metas((args, kwargs)) if id(t) in blank}
        return tree_map_only(
            Tensor, lambda t: own[id(t)] if id(t) in own else torch.empty_like(t, device="meta"), drawn
        )

    @torch.no_grad()
    def made(self, tensor: Tensor) -> Tensor:
        """Return the tensor with memory and values; a tensor that already has them is returned as it is."""
        if not _deferred(tensor):
            return tensor
        view, storages = _View.of(tensor), dict[Key, Tensor]()
        for index in sorted(self._needed(view.key)):
            self._done[index].repeat(storages)
        return view.real(storages)

    def _needed(self, key: Key) -> set[int]:
        """Find the operations that used this storage, or a storage on which it depends."""
        found: set[int] = set()
        keys, seen = [key], {key}
        while keys:
            new = {index for index in self._of[keys.pop()] if index not in found}
            found |= new
            reached = {k for index in new for k in self._done[index].touched()} - seen
            seen |= reached
            keys += reached
        return found

    def materialize(self, tensors: Iterable[Tensor], kept: Set[Tensor]) -> None:
        """Give memory and values to buffers and kept parameters, and an empty shape to other parameters. The tensor
        objects stay the same. ValueError: a hook on one of the tensors, which would be lost."""
        own = [tensor for tensor in tensors if _deferred(tensor)]
        for tensor in own:
            if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
                raise ValueError(
                    f"a tensor of shape {tuple(tensor.shape)} got a hook while it had no memory, and the hook would be "
                    "lost: register hooks in on_fit_start instead of configure_model"
                )
        for tensor in own:
            stays = tensor in kept or not isinstance(tensor, nn.Parameter)
            values = self.made(tensor) if stays else torch.empty(0, dtype=tensor.dtype)
            like = nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
            like.__class__ = type(tensor)
            like.__dict__.update(tensor.__dict__)  # attributes that other code has set on the tensor
            torch.utils.swap_tensors(tensor, like)
        self._done.clear()  # and the operations' arguments
        self._of.clear()


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Storage offset, size and stride of a tensor."""
    return tensor.storage_offset(), tensor.size(), tensor.stride()


def _metas(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and _deferred(leaf)]


def _deferred(tensor: Tensor) -> bool:
    return tensor.untyped_storage().device.type == "meta"


def _views(tree: Any) -> Any:
    return tree_map_only(Tensor, lambda t: _View.of(t) if _deferred(t) else _Given.of(t), tree)


def _written(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    arguments = function._schema.arguments
    pairs = [*zip(arguments, args, strict=False), *((a, kwargs[a.name]) for a in arguments if a.name in kwargs)]
    values = [value for argument, value in pairs if argument.alias_info is not None and argument.alias_info.is_write]
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _generator(args: Any, kwargs: Mapping[str, Any]) -> torch.Generator:
    named = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Generator)]
    return named[0] if named else torch.default_generator


@contextmanager
def drawn_alike(broadcast: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Draw on all workers what worker 0 draws on its CPU, so that deferred tensors are never sent. Collective."""
    first = broadcast(own := torch.get_rng_state())
    torch.set_rng_state(first)
    yield
    if not torch.equal(own, first):
        torch.set_rng_state(own)


def tensors_of(module: nn.Module) -> list[Tensor]:
    """List parameters, buffers, and tensors that are plain attributes; each once."""
    plain = [value for part in module.modules() for value in vars(part).values() if isinstance(value, Tensor)]
    return list(dict.fromkeys([*module.parameters(), *module.buffers(), *plain]))
