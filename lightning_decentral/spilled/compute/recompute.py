"""Recomputation: what a call depends on besides inputs and parameters, so that a second one comes out the same."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_decentral.shared.compute.around.rerun import Autocast, Remembered
from lightning_decentral.spilled.compute.transfer import Device


class Moment:
    """Random numbers, autocast, default type, plain attributes and buffers just before a call of the module.

    Create it before the call, `seal` it behind, run the second call within `again`.
    """

    def __init__(self, module: nn.Module, device: Device) -> None:
        self._module, self._device = module, device
        self._random = device.random_state()
        self._default = torch.get_default_dtype()
        self._autocast, self._remembered = Autocast(device.place), Remembered(module)
        held = [(part, name, _at(part, name)) for part, name in _slots(module)]
        self._buffers = [(part, name, b, b.clone()) for part, name, b in held if b is not None]

    def seal(self) -> None:
        """Keep the former values of what the call changed only."""
        # Values are compared, as not every operation counts versions; a device is asked once for all of them.
        rows = [r for r in self._buffers if _at(r[0], r[1]) is r[2] and r[2].shape == r[3].shape]
        same = torch.stack([(r[2] == r[3]).all() for r in rows]).tolist() if rows else []
        kept = {id(r[3]) for r, unchanged in zip(rows, same, strict=True) if unchanged}
        self._buffers = [r for r in self._buffers if id(r[3]) not in kept]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Context manager in which the forward's state is as it was then; afterwards as it is now."""
        random, default = self._device.random_state(), torch.get_default_dtype()
        now = [(module, name, _at(module, name)) for module, name, *_ in self._buffers]
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


def _slots(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    return ((part, name) for part in module.modules() for name in part._buffers)


def _at(module: nn.Module, name: str) -> Tensor | None:
    return module._buffers[name]


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
