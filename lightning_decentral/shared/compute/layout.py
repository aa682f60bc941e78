"""Memory layout of a model: checked to be equal on all workers at set-up, and restored where it changes.

A message is flat memory, and strides decide which element lies where. Workers with different strides (one of them in
channels_last) would average different elements. A parameter's layout in a message and in a rule's state follows from
its shape, type and strides."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

if TYPE_CHECKING:
    from lightning_decentral.shared.compute.buckets import Bucket

Strides = tuple[int, ...]


def dense_strides(tensor: Tensor) -> Strides:
    """Return the strides of a dense copy that keeps the dimensions' order in memory (channels_last stays so)."""
    size, own, found, step = tensor.shape, tensor.stride(), [1] * tensor.dim(), 1
    for dim in reversed(memory_order(size, own)):
        found[dim], step = step, step * size[dim]
    dense = all(mine == new for mine, new, n in zip(own, found, size, strict=True) if n > 1)
    return own if dense else tuple(found)


def memory_order(size: Sequence[int], strides: Strides) -> tuple[int, ...]:
    """Return dimensions from the slowest to the fastest, without those of size 1, whose strides mean nothing."""
    long = [d for d in range(len(size)) if size[d] > 1]
    return tuple(sorted(long, key=lambda d: (-strides[d], d)))


def is_row_major(size: Sequence[int], strides: Strides) -> bool:
    order = memory_order(size, strides)
    return order == tuple(sorted(order))


@dataclass(frozen=True)
class Place:
    """Shape, dtype and strides of a parameter."""

    shape: torch.Size
    dtype: torch.dtype
    strides: Strides

    @classmethod
    def of(cls, tensor: Tensor) -> "Place":
        return cls(tensor.shape, tensor.dtype, dense_strides(tensor))

    @classmethod
    def row_major(cls, tensor: Tensor) -> "Place":
        return cls(tensor.shape, tensor.dtype, torch.empty(tuple(tensor.shape), device="meta").stride())

    @property
    def order(self) -> tuple[int, ...]:
        return memory_order(self.shape, self.strides)

    def refuse_changed(self, tensor: Tensor) -> None:
        """Raise ValueError where the parameter's shape or type has changed."""
        if (tensor.shape, tensor.dtype) != (self.shape, self.dtype):
            raise ValueError(
                f"a parameter of {self} became {Place.of(tensor)} after set-up, but messages keep the old shape: "
                "change the parameter in configure_model() or setup(), on every worker"
            )

    def check(self, tensor: Tensor) -> None:
        """Raise ValueError where the parameter's shape or type has changed; warn where its memory order has."""
        self.refuse_changed(tensor)
        if Place.of(tensor).order != self.order:
            warnings.warn(
                f"a parameter of {self} got strides {tensor.stride()} after set-up, and is set back to those that all "
                "workers began with: give a memory format in configure_model() or setup()",
                stacklevel=2,
            )

    def __str__(self) -> str:
        return f"shape {tuple(self.shape)}, {self.dtype}"


def orders(buckets: "Iterable[Bucket]") -> list[list[int]]:
    """Return each parameter's order of dimensions in memory, for a checkpoint: messages and states are flat memory."""
    return [[*place.order] for bucket in buckets for place in bucket.places]


def refuse_reordered(state: Mapping[str, Any], buckets: "Iterable[Bucket]") -> None:
    """Raise ValueError where flat state was saved in another memory order than the model has now."""
    flat = any(state["states"]) or state["flights"] or len(state["exchange"]) > 1  # there is more than the codec's name
    now = orders(buckets)
    if flat and len(state.get("orders", ())) == len(now) and state["orders"] != now:
        raise ValueError(
            "the checkpoint's messages lie in another memory order: give the model the memory format of that run, or "
            "delete its .workers folder to start from the mean"
        )


def refuse_lazy(parameters: Iterable[Tensor]) -> None:
    """Raise ValueError where a parameter has no shape yet."""
    if any(map(is_lazy, parameters)):
        raise ValueError("a lazy module has uninitialized parameters: run one batch through it before training")


def described(module: nn.Module) -> dict[str, str]:
    """{name: shape, type, strides unless they are row-major, whether it's frozen} of parameters and buffers.
    ValueError: a parameter without a shape, or with numbers that share memory."""
    refuse_lazy(module.parameters())
    parameters = {name: _text(p) + ("" if p.requires_grad else " (frozen)") for name, p in module.named_parameters()}
    for name, parameter in module.named_parameters():
        # Expanded: elements share memory, so an update of one in place changes the others.
        if any(step == 0 and n > 1 for n, step in zip(parameter.shape, parameter.stride(), strict=True)):
            raise ValueError(
                f"{name} of shape {tuple(parameter.shape)} repeats its memory (strides {parameter.stride()}): expand "
                "it in forward, or make it nn.Parameter(x.clone())"
            )
    return parameters | {name: _text(buffer) for name, buffer in module.named_buffers()}


def _text(tensor: Tensor) -> str:
    if tensor.layout != torch.strided:
        return f"{tuple(tensor.shape)} {tensor.dtype} {tensor.layout}"
    size, strides = tuple(tensor.shape), dense_strides(tensor)
    return f"{size} {tensor.dtype}" + ("" if is_row_major(size, strides) else f" strides {strides}")


def refuse_shared(module: nn.Module) -> None:
    """Raise ValueError for a trained parameter that shares memory with another tensor: in a message each has elements
    of its own, so the two would differ afterwards."""
    found = dict(chain(module.named_parameters(), module.named_buffers()))
    dense = {name: tensor for name, tensor in found.items() if tensor.layout == torch.strided and tensor.numel() > 0}
    there = {name: tensor for name, tensor in dense.items() if not (tensor.is_meta or is_lazy(tensor))}
    ranges = sorted((*_range(tensor), name) for name, tensor in there.items())
    open_ones: list[tuple[int, str]] = []
    for start, end, name in ranges:
        open_ones = [(until, other) for until, other in open_ones if until > start]  # overlap this range
        for _, other in open_ones:
            pair = found[name], found[other]
            if any(t.requires_grad for t in pair) and _share(*pair):
                raise ValueError(
                    f"{other} and {name} share memory without being one parameter, and messages would separate them: "
                    "tie them as one (head.weight = embedding.weight), or clone one"
                )
        open_ones.append((end, name))


def _range(tensor: Tensor) -> tuple[int, int]:
    """Return the tensor's addresses, from its first element to behind its last."""
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size()


def _share(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors share an element; columns of one matrix, whose ranges overlap, don't."""
    if one.device != other.device or one.dtype != other.dtype:
        return one.device == other.device
    first, each = min(one.data_ptr(), other.data_ptr()), one.element_size()
    places = torch.zeros(max(_range(one)[1], _range(other)[1]) - first, dtype=torch.bool)  # one per byte: enough
    starts = [(t.data_ptr() - first) // each for t in (one, other)]
    views = [torch.as_strided(places, t.shape, t.stride(), at) for t, at in zip((one, other), starts, strict=True)]
    views[0].fill_(True)
    return bool(views[1].any())


def put(tensor: Tensor, value: Tensor) -> None:
    """Set tensor <- value, in place; an expanded tensor's repeated memory is written once."""
    mine = tensor
    for dim, (size, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        mine = mine.narrow(dim, 0, 1) if step == 0 and size > 1 else mine  # one element of those that share memory
    mine.copy_(value if mine is tensor else value[tuple(slice(size) for size in mine.shape)])


@torch.no_grad()
def laid(tensor: Tensor, place: Place) -> Tensor:
    """Return the tensor if its memory has this order, else a copy that has."""
    if Place.of(tensor).order == place.order:
        return tensor
    if is_row_major(place.shape, place.strides):
        return tensor.contiguous()
    return torch.empty_strided(place.shape, place.strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def lay_states(optimizer: Optimizer) -> None:
    """Give optimizer states of their parameter's shape its memory order: fused optimizers read both as flat memory. The
    orders differ where the model has another memory format than the file or worker that the states come from."""
    for parameter, state in optimizer.state.items():
        if not isinstance(state, dict):
            continue  # a state of the optimizer's own type
        alike = [name for name, value in state.items() if isinstance(value, Tensor) and value.shape == parameter.shape]
        for name in alike:
            state[name] = laid(state[name], Place.of(parameter))


class ModelLayout:
    """Remembers the memory layouts of parameters at set-up; parameters added later are row-major on all workers."""

    def __init__(self, parameters: Iterable[nn.Parameter] = ()) -> None:
        self._places: dict[nn.Parameter, Place] = {}
        self.note(parameters)

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._places

    def note(self, parameters: Iterable[nn.Parameter]) -> None:
        """Record the present layouts of parameters that aren't recorded yet, at set-up."""
        new = [p for p in parameters if p not in self._places and p.layout == torch.strided and not is_lazy(p)]
        self._places |= {p: Place.of(p) for p in new}

    @torch.no_grad()
    def restore(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Restore the recorded layouts of these parameters, by default of all trained ones. ValueError: a trained one
        has another shape or type."""
        trained = [p for p in self._places if p.requires_grad]
        for parameter in trained if parameters is None else parameters:
            place = self._places.get(parameter) or Place.row_major(parameter)
            # A frozen parameter may have been replaced meanwhile, on all workers: its layout isn't recorded yet.
            if parameters is not None and (place.shape, place.dtype) != (parameter.shape, parameter.dtype):
                place = Place.row_major(parameter)
            if parameter in self._places:
                place.check(parameter)
            value = laid(parameter, place)
            if value is not parameter:
                parameter.data = value  # the same Parameter: optimizers and hooks keep it


def same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether both sequences have the same objects in the same order."""
    return len(some) == len(others) and all(map(is_, some, others))  # hashes would run Python code
