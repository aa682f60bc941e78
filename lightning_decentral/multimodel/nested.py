"""Tensors taken out of nested arguments and put back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten


@dataclass(frozen=True)
class _Slot:
    """Where a tensor was."""

    index: int


class Taken:
    """Nested values, and the distinct tensors in them apart, in order.

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
