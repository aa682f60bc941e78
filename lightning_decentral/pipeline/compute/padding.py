"""Padding masks that hide nothing, recognized on the host before their batch goes to a device.

`transformers` builds no mask where padding hides nothing, and attention keeps its flash kernel. On a device the host
would wait for that answer, so it looks before, and what a mask became there is remembered: itself, and its micro-batch.

A module of its own: who moves and cuts a batch knows no causal model, and who reads a mask knows no batch.
"""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_full: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()
"""Tensors of ones, and their version counters then: a change in place increases them."""


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch: those of its mappings, lists, tuples and dataclasses, in order."""
    if isinstance(batch, Tensor):
        yield batch
        return
    inside: Iterable[Any] = ()
    if isinstance(batch, Mapping):
        inside = batch.values()
    elif isinstance(batch, (list, tuple)):
        inside = batch
    elif is_dataclass(batch):
        inside = (getattr(batch, field.name) for field in fields(batch))
    for one in inside:
        yield from tensors_in(one)


def remember(before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
    """Remember which of the host's tensors are masks that hide nothing, by what each became on the device."""
    if [tensor.shape for tensor in before] == [tensor.shape for tensor in after]:
        for there, here in zip(before, after, strict=True):
            # A tensor of inference mode doesn't show whether it was changed.
            if here.device.type != "cpu" and not here.is_inference() and _is_full(there):
                _full[here] = here._version


def _is_full(tensor: Tensor) -> bool:
    """Return whether this may be a mask [batch, length] on the host, all ones."""
    number = tensor.device.type == "cpu" and tensor.dim() == 2 and not tensor.is_floating_point()
    return number and bool((tensor == 1).all())


def part_of(tensor: Tensor, parts: int, index: int) -> Tensor:
    """One of so many parts along the first axis. Those of a mask that hides nothing hide nothing."""
    part = tensor.tensor_split(parts)[index]
    if hides_nothing(tensor):
        _full[part] = part._version
    return part


def hides_nothing(mask: Tensor) -> bool:
    """Return whether the host knows that the mask is all ones; no device is asked."""
    return mask in _full and _full[mask] == mask._version
