"""Recomputation: a block runs forward twice; the first run keeps no graph, and the second gives the same result.

torch chooses kernels by whether gradients are wanted. So the first forward records a graph like the second, but saves
nothing in it. A backward that reaches this graph would lose gradients, and raises an error. The second forward starts
from the same state as the first (`Moment`): all that a call depends on besides inputs and parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_decentral.shared.compute.around import Autocast, Remembered, refill
from lightning_decentral.spilled.compute.transfer import OffloadDevice

Holder = dict[Any, Any] | list[Any]
NUMBERS = (bool, int, float, str, type(None))
LEAVES = (*NUMBERS, nn.Module, type, ModuleType)  # a module's buffers are handled elsewhere


def as_trained(copies: Mapping[str, Tensor], trained: Mapping[str, bool]) -> dict[str, Tensor]:
    """Make leaf tensors of the copies, which need gradients if their parameters are trained."""
    return {name: copy.detach().requires_grad_(trained[name]) for name, copy in copies.items()}


@contextmanager
def graph_dropped(block: str, leaves: Iterable[Tensor]) -> Iterator[None]:
    """Run operations in this context as if a backward followed, but save nothing for it."""

    def refuse(_: Any) -> Tensor:
        raise ValueError(
            f"the loss uses a tensor that block {block} made but didn't return, and loses its gradients. "
            "Return the tensor from the block, or name a larger block in blocks"
        )

    for leaf in leaves:
        if leaf.requires_grad:
            leaf.register_hook(refuse)  # also where nothing was saved on the way to the leaf
    with torch.enable_grad(), saved_tensors_hooks(lambda tensor: None, refuse):
        yield


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a backward whose results have no graph; ValueError if a graph is requested."""
    once = once_differentiable(backward)

    def checked(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise ValueError(
                "differentiable gradients (create_graph=True, as for a gradient penalty or forces) don't work through "
                "blocks that run again in the backward: train without strategy='spilled'"
            )
        return once(ctx, *gradients)

    return checked


class Moment:
    """Random numbers, autocast, default dtype, plain attributes and buffers just before a call of a module.

    Create it before the call, call `seal` after it, and run the second call within `again`."""

    def __init__(self, module: nn.Module, device: OffloadDevice) -> None:
        self._module, self._device = module, device
        self._random = device.random_state()
        self._default = torch.get_default_dtype()  # modules may make tensors without a given dtype
        self._autocast, self._remembered = Autocast(device.place), Remembered(module)
        held = [(part, name, buffer) for part in module.modules() for name, buffer in part._buffers.items()]
        # (module, name, the buffer, its values): kept until `seal` finds which buffers the call changed.
        self._buffers = [(part, name, b, b.clone()) for part, name, b in held if b is not None]

    def seal(self) -> None:
        """Keep former values only of the buffers and attributes that the call changed."""
        # Values are compared, as some operations don't count versions; a device is asked once for all of them.
        rows = [r for r in self._buffers if r[0]._buffers[r[1]] is r[2] and r[2].shape == r[3].shape]
        same = torch.stack([(r[2] == r[3]).all() for r in rows]).tolist() if rows else []
        kept = {id(r[3]) for r, unchanged in zip(rows, same, strict=True) if unchanged}
        self._buffers = [r for r in self._buffers if id(r[3]) not in kept]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Restore the state of the first forward in this context, and afterwards the present state."""
        random, default = self._device.random_state(), torch.get_default_dtype()
        now = [(module, name, module._buffers[name]) for module, name, *_ in self._buffers]
        with self._autocast.again(), self._remembered.again():
            try:
                self._device.set_random_state(self._random)
                torch.set_default_dtype(self._default)
                for module, name, _, former in self._buffers:
                    module._buffers[name] = former
                yield
            finally:
                for module, name, held in now:  # the first call's: running statistics change once
                    module._buffers[name] = held
                torch.set_default_dtype(default)
                self._device.set_random_state(random)


class Taken:
    """Nested values split into their structure, their distinct `tensors`, in order, until they are dropped, and
    `others`, which aren't tensors."""

    def __init__(self, values: Any) -> None:
        leaves, self._form = tree_flatten(values)
        self.tensors = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())
        index = {id(tensor): i for i, tensor in enumerate(self.tensors)}
        self.others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        # (index of a tensor, None), or (None, a value that isn't a tensor)
        self._leaves = [(index[id(leaf)], None) if isinstance(leaf, Tensor) else (None, leaf) for leaf in leaves]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Any:
        leaves = [leaf if index is None else tensors[index] for index, leaf in self._leaves]
        return tree_unflatten(leaves, self._form)

    def drop(self) -> list[Tensor]:
        """Return the tensors and keep them no longer."""
        tensors, self.tensors = self.tensors, []
        return tensors


@runtime_checkable
class Cache(Protocol):
    """Interface of a cache of keys and values, as in transformers: a block writes and reads its own entries."""

    def update(self, *args: Any, **kwargs: Any) -> Any: ...

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int: ...


@dataclass(frozen=True)
class _Held:
    """A dictionary, a list, or an object's attributes, with their former contents."""

    holder: Holder
    former: Holder
    owner: Any  # the outermost object, or a cache, that contains it

    @property
    def changed(self) -> bool:
        now, former = _parts(self.holder), _parts(self.former)
        keys_differ = isinstance(self.holder, dict) and list(self.holder) != list(self.former)
        # The same objects, or equal numbers and texts.
        same = (
            a is b or (isinstance(a, NUMBERS) and isinstance(b, NUMBERS) and a == b)
            for a, b in zip(now, former, strict=False)
        )
        return keys_differ or len(now) != len(former) or not all(same)


class GivenObjects:
    """Objects among the arguments, (args, kwargs), of a call: the second run finds their attributes as the first run
    did. `inputs`: the tensors among them that get gradients in the backward.

    Create it before the call, call `put_back` after it, and run the second call within `again`."""

    def __init__(self, arguments: tuple[Iterable[Any], dict[str, Any]], inputs: Sequence[Tensor]) -> None:
        self._held: list[_Held] = []
        self._tensors: list[tuple[Tensor, int, Any]] = []  # with their versions and owners
        (args, kwargs), seen = arguments, {id(tensor) for tensor in inputs}
        waiting = [(value, value) for value in (*args, *kwargs.values())]
        while waiting:
            value, owner = waiting.pop()
            if isinstance(value, LEAVES) or id(value) in seen:
                continue
            seen.add(id(value))  # objects may refer to each other in circles
            if isinstance(value, Tensor):
                self._tensors.append((value, _version(value), owner))
                continue
            attributes = getattr(value, "__dict__", None)
            if attributes is not None and not isinstance(owner, Cache) and isinstance(value, Cache):
                owner = value  # a cache owns its contents, also if other objects refer to the cache
            holders = [holder for holder in (value, attributes) if isinstance(holder, (dict, list))]
            self._held += [_Held(holder, _copy(holder), owner) for holder in holders]
            parts = [part for holder in holders for part in _parts(holder)]
            waiting += [(part, owner) for part in (*parts, *(value if isinstance(value, tuple) else ()))]
        # Types of the objects with other tensors that need gradients.
        self.unreached = [type(owner).__name__ for tensor, _, owner in self._tensors if tensor.requires_grad]

    def put_back(self) -> tuple[list[Any], list[str]]:
        """Return (restored caches to which the call wrote, types of other objects to which it wrote)."""
        self._held = [held for held in self._held if held.changed]
        others = [held.owner for held in self._held if not isinstance(held.owner, Cache)]
        others += [owner for tensor, version, owner in self._tensors if _version(tensor) != version]
        caches = {id(held.owner): held.owner for held in self._held if isinstance(held.owner, Cache)}
        self._tensors = []  # kept no longer: their memory is the device's
        for held in self._held:
            refill(held.holder, held.former)
        return list(caches.values()), [type(owner).__name__ for owner in others]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Restore the objects in this context as before the call, and afterwards their present state."""
        now = [_copy(held.holder) for held in self._held]
        try:
            for held in self._held:
                refill(held.holder, held.former)
            yield
        finally:
            for held, values in zip(self._held, now, strict=True):
                refill(held.holder, values)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # tensors made in inference mode count nothing


def _copy(holder: Holder) -> Holder:
    return list(holder) if isinstance(holder, list) else dict(holder)


def _parts(holder: Holder) -> Collection[Any]:
    return holder if isinstance(holder, list) else holder.values()
