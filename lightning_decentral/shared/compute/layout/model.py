"""Layout of a model: what is compared of it at set-up, what is refused, and what is put back later."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_decentral.shared.compute.layout.place import Place, dense_strides, is_row_major

Pack = Callable[[Sequence[nn.Parameter]], list[Any]]


def described(module: nn.Module) -> dict[str, str]:
    """{name: shape, type, strides unless they are row-major, whether it's frozen} of parameters and buffers.

    Raises:
        ValueError: a parameter without a shape, or with numbers that share memory.
    """
    if any(map(is_lazy, module.parameters())):
        raise ValueError("a lazy module has uninitialized parameters: run one batch through it before training")
    parameters = {name: _text(p) + ("" if p.requires_grad else " (frozen)") for name, p in module.named_parameters()}
    for name, parameter in module.named_parameters():
        refuse_repeated(name, parameter)
    return parameters | {name: _text(buffer) for name, buffer in module.named_buffers()}


def _text(tensor: Tensor) -> str:
    size, strides = tuple(tensor.shape), dense_strides(tensor)
    return f"{size} {tensor.dtype}" + ("" if is_row_major(size, strides) else f" strides {strides}")


def refuse_repeated(name: str, parameter: Tensor) -> None:
    """ValueError for an expanded one: an update in place would be one of all that share a number."""
    if any(step == 0 and n > 1 for n, step in zip(parameter.shape, parameter.stride(), strict=True)):
        raise ValueError(
            f"{name} of shape {tuple(parameter.shape)} repeats its memory (strides {parameter.stride()}): expand it "
            "in forward, or make it nn.Parameter(x.clone())"
        )


def refuse_shared(module: nn.Module) -> None:
    """ValueError for a trained parameter in another tensor's memory: in a message it has numbers of its own, and the
    two part."""
    found = dict(chain(module.named_parameters(), module.named_buffers()))
    ranges = sorted((*_range(tensor), name) for name, tensor in found.items() if _has_memory(tensor))
    open_ones: list[tuple[int, str]] = []
    for start, end, name in ranges:
        open_ones = [(until, other) for until, other in open_ones if until > start]
        for _, other in open_ones:
            pair = found[name], found[other]
            if any(t.requires_grad for t in pair) and _share(*pair):
                raise ValueError(
                    f"{other} and {name} share memory without being one parameter, and messages would part them: "
                    "tie them as one (head.weight = embedding.weight), or clone one"
                )
        open_ones.append((end, name))


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.numel() > 0 and not (tensor.is_meta or is_lazy(tensor))


def _range(tensor: Tensor) -> tuple[int, int]:
    """Addresses from its first number to behind its last."""
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size()


def _share(one: Tensor, other: Tensor) -> bool:
    """Whether they have a number in common: columns of one matrix lie in one range, and don't."""
    if one.device != other.device or one.dtype != other.dtype:
        return one.device == other.device
    first, each = min(one.data_ptr(), other.data_ptr()), one.element_size()
    places = torch.zeros(max(_range(one)[1], _range(other)[1]) - first, dtype=torch.bool)
    starts = [(t.data_ptr() - first) // each for t in (one, other)]
    views = [torch.as_strided(places, t.shape, t.stride(), at) for t, at in zip((one, other), starts, strict=True)]
    views[0].fill_(True)
    return bool(views[1].any())


def once(tensor: Tensor) -> Tensor:
    """Of an expanded tensor what it repeats, which may be written in place."""
    for dim, (size, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        tensor = tensor.narrow(dim, 0, 1) if step == 0 and size > 1 else tensor
    return tensor


class ModelLayout:
    """How parameters lay in memory when the workers were compared; those that came later lie row-major everywhere."""

    def __init__(self, parameters: Iterable[nn.Parameter] = ()) -> None:
        self._places: dict[nn.Parameter, Place] = {}
        self.note(parameters)

    def note(self, parameters: Iterable[nn.Parameter]) -> None:
        """At set-up: those that aren't known lie as they do now."""
        self._places |= {p: Place.of(p) for p in parameters if p not in self._places and not is_lazy(p)}

    @torch.no_grad()
    def restore(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """See that these, by default all that are known, lie as they did.

        Raises:
            ValueError: one has another shape or type.
        """
        for parameter in [*self._places] if parameters is None else parameters:
            known = self._places.get(parameter)
            if known is not None:
                known.check(parameter)
            place = known or Place.row_major(parameter)
            if Place.of(parameter).order != place.order:
                empty = torch.empty_strided(place.shape, place.strides, dtype=place.dtype, device=parameter.device)
                parameter.data = empty.copy_(parameter)

    def packing(self, pack: Pack) -> Pack:
        """`pack` of parameters that lie as all workers' do: also of those that are freed later."""

        def restored(parameters: Sequence[nn.Parameter]) -> list[Any]:
            self.restore(parameters)
            return pack(parameters)

        return restored
