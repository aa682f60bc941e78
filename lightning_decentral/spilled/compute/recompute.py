"""Recomputation: the two forwards of a block, of which the first keeps no graph, and the second comes out the same.

Which kernels torch takes depends on whether gradients are wanted. So the first forward records a graph as the second
one does, in which nothing is kept. A backward that comes upon it would lose gradients, and is an error. The second one
finds what a call depends on besides inputs and parameters as the first one found it (`Moment`).
"""

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

from lightning_decentral.shared.compute.around import Autocast, Remembered
from lightning_decentral.spilled.compute.transfer import OffloadDevice

Holder = dict[Any, Any] | list[Any]
NUMBERS = (bool, int, float, str, type(None))
LEAVES = (*NUMBERS, nn.Module, type, ModuleType)  # a module's buffers are looked after elsewhere


def as_trained(copies: Mapping[str, Tensor], trained: Mapping[str, bool]) -> dict[str, Tensor]:
    """Leaves that need gradients where these parameters are trained."""
    return {name: copy.detach().requires_grad_(trained[name]) for name, copy in copies.items()}


@contextmanager
def graph_dropped(block: str, leaves: Iterable[Tensor]) -> Iterator[None]:
    """Context manager in which operations run as where a backward follows, and nothing is saved for it."""

    def refuse(_: Any) -> Tensor:
        raise ValueError(
            f"a tensor that block {block} made and didn't return is used by the loss, which loses its gradients: "
            "return it from the block, or name a larger block in blocks"
        )

    for leaf in leaves:
        if leaf.requires_grad:
            leaf.register_hook(refuse)  # also where nothing was saved on the way to it
    with torch.enable_grad(), saved_tensors_hooks(lambda tensor: None, refuse):
        yield


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward whose results have no graph; ValueError where one is asked for."""
    once = once_differentiable(backward)

    def checked(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise ValueError(
                "gradients that are differentiable themselves (create_graph=True, as a gradient penalty or forces need "
                "them) don't go through blocks that run again in the backward: train without strategy='spilled'"
            )
        return once(ctx, *gradients)

    return checked


class Moment:
    """Random numbers, autocast, default type, plain attributes and buffers just before a call of the module.

    Create it before the call, `seal` it behind, run the second call within `again`.
    """

    def __init__(self, module: nn.Module, device: OffloadDevice) -> None:
        self._module, self._device = module, device
        self._random = device.random_state()
        self._default = torch.get_default_dtype()  # modules may make tensors of no given type
        self._autocast, self._remembered = Autocast(device.place), Remembered(module)
        held = [(part, name, buffer) for part in module.modules() for name, buffer in part._buffers.items()]
        # (module, name, the buffer, its values): kept until `seal` finds which ones the call changed.
        self._buffers = [(part, name, b, b.clone()) for part, name, b in held if b is not None]

    def seal(self) -> None:
        """Keep the former values of what the call changed only."""
        # Values are compared, as not every operation counts versions; a device is asked once for all of them.
        rows = [r for r in self._buffers if r[0]._buffers[r[1]] is r[2] and r[2].shape == r[3].shape]
        same = torch.stack([(r[2] == r[3]).all() for r in rows]).tolist() if rows else []
        kept = {id(r[3]) for r, unchanged in zip(rows, same, strict=True) if unchanged}
        self._buffers = [r for r in self._buffers if id(r[3]) not in kept]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Context manager in which the forward's state is as it was then; afterwards as it is now."""
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
                for module, name, held in now:  # the first call's: running statistics move once
                    module._buffers[name] = held
                torch.set_default_dtype(default)
                self._device.set_random_state(random)


class Taken:
    """Nested values, and the distinct tensors in them separately, in order.

    Attributes:
        tensors: those, until they are dropped.
        others: what is no tensor.
    """

    def __init__(self, values: Any) -> None:
        leaves, self._form = tree_flatten(values)
        self.tensors = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())
        index = {id(tensor): i for i, tensor in enumerate(self.tensors)}
        self.others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        # (index of a tensor, None), or (None, what is no tensor)
        self._leaves = [(index[id(leaf)], None) if isinstance(leaf, Tensor) else (None, leaf) for leaf in leaves]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Any:
        """The values with these in the places of the tensors."""
        leaves = [leaf if index is None else tensors[index] for index, leaf in self._leaves]
        return tree_unflatten(leaves, self._form)

    def drop(self) -> list[Tensor]:
        """The tensors; they are held no longer."""
        tensors, self.tensors = self.tensors, []
        return tensors


@runtime_checkable
class Cache(Protocol):
    """Cache of keys and values, like those of transformers: a block writes its own there, and reads them at once."""

    def update(self, *args: Any, **kwargs: Any) -> Any: ...

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int: ...


@dataclass(frozen=True)
class _Held:
    """A dictionary, a list, or the attributes of an object, and what they held."""

    holder: Holder
    former: Holder
    owner: Any  # the outermost object, or a cache, that it is a part of

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
    """Objects among the arguments of a call: the second run finds their attributes as the first one found them.

    Create it before the call; `put_back` behind it, and run the second call within `again`.

    Args:
        arguments: (args, kwargs) of the call.
        inputs: the tensors in them that the backward gives gradients to.
    """

    def __init__(self, arguments: tuple[Iterable[Any], dict[str, Any]], inputs: Sequence[Tensor]) -> None:
        self._held: list[_Held] = []
        self._tensors: list[tuple[Tensor, int, Any]] = []  # with their versions and owners
        (args, kwargs), seen = arguments, {id(tensor) for tensor in inputs}
        waiting = [(value, value) for value in (*args, *kwargs.values())]
        while waiting:
            value, owner = waiting.pop()
            if isinstance(value, LEAVES) or id(value) in seen:
                continue
            seen.add(id(value))  # objects may hold each other in circles
            if isinstance(value, Tensor):
                self._tensors.append((value, _version(value), owner))
                continue
            attributes = getattr(value, "__dict__", None)
            if attributes is not None and not isinstance(owner, Cache) and isinstance(value, Cache):
                owner = value  # what a cache holds is its own, also where others hold the cache
            holders = [holder for holder in (value, attributes) if isinstance(holder, (dict, list))]
            self._held += [_Held(holder, _copy(holder), owner) for holder in holders]
            parts = [part for holder in holders for part in _parts(holder)]
            waiting += [(part, owner) for part in (*parts, *(value if isinstance(value, tuple) else ()))]
        # Types of the objects that hold other tensors which need gradients.
        self.unreached = [type(owner).__name__ for tensor, _, owner in self._tensors if tensor.requires_grad]

    def put_back(self) -> tuple[list[Any], list[str]]:
        """(caches that were written to, and are as before now; types of what else was written to)."""
        self._held = [held for held in self._held if held.changed]
        others = [held.owner for held in self._held if not isinstance(held.owner, Cache)]
        others += [owner for tensor, version, owner in self._tensors if _version(tensor) != version]
        caches = {id(held.owner): held.owner for held in self._held if isinstance(held.owner, Cache)}
        self._tensors = []  # they are held no longer: their memory is the device's
        for held in self._held:
            _put(held.holder, held.former)
        return list(caches.values()), [type(owner).__name__ for owner in others]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Context manager in which the objects are as before the call; afterwards as they are now."""
        now = [_copy(held.holder) for held in self._held]
        try:
            for held in self._held:
                _put(held.holder, held.former)
            yield
        finally:
            for held, values in zip(self._held, now, strict=True):
                _put(held.holder, values)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # those made by inference count nothing


def _copy(holder: Holder) -> Holder:
    return list(holder) if isinstance(holder, list) else dict(holder)


def _parts(holder: Holder) -> Collection[Any]:
    return holder if isinstance(holder, list) else holder.values()


def _put(holder: Holder, values: Holder) -> None:
    holder.clear()
    if isinstance(holder, list):
        holder.extend(values)
    else:
        holder.update(values)
