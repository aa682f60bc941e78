"""Memory tracker for a device which isn't there: bytes of every storage that an operation makes, until it dies."""

import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE, HOST = "device", "host"


class Ledger:
    """Ledger of living storages: where each is, and how many bytes of them.

    Attributes:
        present_bytes: on the device now.
        peak_bytes: the most since `forget_peak`.
    """

    def __init__(self) -> None:
        self.present_bytes = self.peak_bytes = 0
        self._living: dict[int, tuple[str, int, Any]] = {}  # by storage: (where, bytes, weak reference)

    def add(self, tensors: Iterable[Any], where: str) -> None:
        """Record that these tensors are at `where`, whatever was recorded before."""
        for tensor in tensors:
            if _counted(tensor):
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                self._strike(key)
                self._living[key] = where, size, weakref.ref(storage, partial(self._strike, key))
                self._change(where, size)

    def where(self, tensor: Tensor) -> str | None:
        """Place of the tensor's storage; None for one that nobody recorded."""
        entry = self._living.get(tensor.untyped_storage()._cdata)
        return entry and entry[0]

    def forget_peak(self) -> None:
        """Begin again at what is present."""
        self.peak_bytes = self.present_bytes

    def _strike(self, key: int, _dead: Any = None) -> None:
        where, size, _ = self._living.pop(key, (HOST, 0, None))
        self._change(where, -size)

    def _change(self, where: str, size: int) -> None:
        self.present_bytes += size if where == DEVICE else 0
        self.peak_bytes = max(self.peak_bytes, self.present_bytes)


class Counting(TorchDispatchMode):
    """Writes what operations make into a ledger.

    Args:
        absent: names of tensors by storage that stand for parameters which aren't on the device: computing with one is
            an error.
    """

    def __init__(self, ledger: Ledger, absent: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger, self._absent = ledger, absent

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if _counted(leaf)]
        # Views and in-place operations make no new bytes.
        old = {tensor.untyped_storage()._cdata for tensor in given}
        made = [leaf for leaf in tree_leaves(result) if _counted(leaf) and leaf.untyped_storage()._cdata not in old]
        if made:
            if wrong := [self._absent[key] for key in old if key in self._absent]:
                raise ValueError(
                    f"parameter {wrong[0]} is used outside of a call of the block that holds it, when it isn't on the "
                    f"device: give resident=[{wrong[0]!r}] to keep it there during the whole step"
                )
            # As on a real device: a result of host tensors only is on the host, any other one on the device.
            on_host = bool(given) and all(self._ledger.where(tensor) == HOST for tensor in given)
            self._ledger.add(made, HOST if on_host else DEVICE)
        return result


def _counted(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided  # sparse ones have no storage to ask
