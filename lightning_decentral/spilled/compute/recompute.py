"""Recomputation: the two forwards of a block, of which the first keeps no graph, and the second comes out the same.

Which kernels torch takes depends on whether gradients are wanted. So the first forward records a graph as the second
one does, in which nothing is kept. A backward that comes upon it would lose gradients, and is an error. The second one
finds what a call depends on besides inputs and parameters as the first one found it (`Moment`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_decentral.shared.compute.around import Autocast, Remembered
from lightning_decentral.spilled.compute.transfer import OffloadDevice


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


def without_graph(tensor: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    """A result of the block. Views can't lose their graph in place."""
    if any(tensor is given for given in inputs):
        return tensor  # autograd sees it as an input that is returned
    return tensor.detach() if tensor._is_view() else tensor.detach_()


def refuse_transformed(block: str) -> None:
    """ValueError within torch.func's transforms and forward-mode differentiation."""
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        raise ValueError(
            f"block {block} is differentiated by torch.func or in forward mode, which its second run in the backward "
            "can't serve: use loss.backward(), or train without strategy='spilled'"
        )


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


@dataclass(frozen=True)
class _Slot:
    """Placeholder of a tensor in nested values, by its index."""

    index: int


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
        self._leaves = [_Slot(index[id(leaf)]) if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Any:
        """The values with these in the places of the tensors."""
        leaves = [tensors[leaf.index] if isinstance(leaf, _Slot) else leaf for leaf in self._leaves]
        return tree_unflatten(leaves, self._form)

    def drop(self) -> list[Tensor]:
        """The tensors; they are held no longer."""
        tensors, self.tensors = self.tensors, []
        return tensors
