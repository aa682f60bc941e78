"""Blocks of a model: which modules are loaded separately, and where each parameter, or a copy of it, is.

Writing to a copy raises an error: the parameter on the host wouldn't change."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_decentral.shared.compute.modules import BlockSequence, candidates

AUTO = "auto"


@dataclass(frozen=True)
class ParameterPlace:
    """Attribute of a module that is a parameter; a parameter shared by modules has several places and one name."""

    module: nn.Module
    attribute: str
    name: str

    @property
    def held(self) -> Tensor:
        found = self.module._parameters.get(self.attribute)
        if found is None:
            raise moved(self.name)
        return found

    def put(self, tensor: Tensor) -> None:
        # An assignment would accept only parameters.
        self.module._parameters[self.attribute] = tensor  # type: ignore[assignment]
        if isinstance(self.module, nn.RNNBase):  # keeps its own list
            self.module._flat_weights = [getattr(self.module, name) for name in self.module._flat_weights_names]


def moved(name: str) -> ValueError:
    """Make the error for a parameter that isn't where it was when the step began."""
    return ValueError(
        f"parameter {name} was registered, removed or reparametrized during a step, but its backward runs blocks "
        "again: do it between two steps, as in on_train_batch_start"
    )


@contextmanager
def placed(places: Iterable[ParameterPlace], tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Put tensors in the places of the parameters with their names, and restore the parameters afterwards."""
    before = [(place, place.held) for place in places if place.name in tensors]  # restored afterwards
    try:
        for place, _ in before:
            place.put(tensors[place.name])
        yield
    finally:
        for place, held in before:
            place.put(held)


def as_standing(places: Sequence[ParameterPlace], hosts: Mapping[str, Tensor]) -> None:
    """Freeze or thaw parameters like their stand-ins, which are all that a user's step can reach."""
    for place in places:
        if hosts[place.name].requires_grad != place.held.requires_grad:
            hosts[place.name].requires_grad_(place.held.requires_grad)


def places(root: nn.Module) -> list[ParameterPlace]:
    """List the places of all parameters in the module, by their first names."""
    names: dict[int, str] = {}  # by identity: a shared parameter has its first name
    found = []
    for prefix, module in root.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                name = names.setdefault(id(parameter), f"{prefix}.{attribute}".lstrip("."))
                found.append(ParameterPlace(module, attribute, name))
    return found


def move_buffers(root: nn.Module, place: torch.device) -> None:
    """Move buffers to the device, and the plain tensors of modules without parameters."""
    for module in root.modules():
        if any(True for _ in module.parameters()):
            module._buffers.update({k: b if b is None else b.to(place) for k, b in module._buffers.items()})
        else:
            module.to(place)  # tensors that aren't registered as buffers


def find(root: nn.Module, wish: str | Sequence[str], resident: Sequence[str]) -> list[str]:
    """Find the blocks' names: the given ones and, elsewhere, every outermost module that has its own parameters.
    `resident`: names of modules and parameters that aren't loaded separately. ValueError: an unknown name, or a block
    within another block.

    "auto" takes the members of chains of layers, see `modules.candidates`: layers before stages, if one stage has most
    of all layers, and before the branches inside of layers. Parameters of a module around blocks, or around resident
    modules, belong to no block."""
    modules = {name for name, _ in root.named_modules() if name}
    named = modules | {name for name, _ in root.named_parameters(remove_duplicate=False)}
    if isinstance(wish, str) and wish != AUTO:
        raise ValueError(f"blocks must be 'auto' or names of modules, got {wish!r}")
    wished = [] if isinstance(wish, str) else list(wish)
    for name in [*(name for name in wished if name not in modules), *(name for name in resident if name not in named)]:
        raise ValueError(
            f"no module named {name!r} in {type(root).__name__}: known are {', '.join(sorted(modules)[:4])}, ..."
        )
    within = [name for name in wished if any(_inside(name, other) for other in wished)]
    if within:
        raise ValueError(f"block {within[0]} lies within another block: name one of the two")
    return list(_blocks(root, "", set(_chained(root) if isinstance(wish, str) else wished), set(resident)))


def _chained(root: nn.Module) -> list[str]:
    """Members of chains that don't overlap: of two, the outer chain, unless one member has over half of its size."""
    sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in root.named_modules()}

    def rank(chain: BlockSequence) -> tuple[bool, int]:
        members = [sizes[name] for name in chain.names]
        return 2 * max(members) > sum(members), chain.names[0].count(".")  # lopsided chains, and inner ones, come last

    found: list[str] = []
    for chain in sorted(candidates(root), key=rank):
        if not any(_inside(a, b) or _inside(b, a) or a == b for a in chain.names for b in found):
            found += chain.names
    return found


def _blocks(module: nn.Module, prefix: str, wished: set[str], resident: set[str]) -> Iterator[str]:
    for child_name, child in module.named_children():
        name = f"{prefix}{child_name}"
        inside = any(_inside(other, name) for other in wished | resident)
        if name in resident or not any(True for _ in child.parameters()):
            continue
        if not inside and (name in wished or any(p is not None for p in child._parameters.values())):
            yield name  # the outermost module: its parameters are loaded together
        else:
            yield from _blocks(child, f"{name}.", wished, resident)


def _inside(name: str, other: str) -> bool:
    return name.startswith(f"{other}.")


def versions(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Version counters of the tensors, by name; inference tensors, which have none, are left out."""
    return {name: tensor._version for name, tensor in tensors.items() if not tensor.is_inference()}


def refuse_written(
    where: str, copies: Mapping[str, Tensor], before: Mapping[str, int], hosts: Mapping[str, Tensor]
) -> None:
    """Raise ValueError if an operation wrote to a copy: its version changed, or it differs from the one in `hosts`.

    Writing through `.data` changes no version."""
    written = [name for name, version in before.items() if copies[name]._version != version]
    for name, host in hosts.items() if not written else ():
        own, here = copies[name].detach().cpu(), host.detach()
        if not (torch.equal(own, here) or torch.allclose(own, here, rtol=0, atol=0, equal_nan=True)):
            written.append(name)
    for name in written:
        raise ValueError(
            f"{where} writes to parameter {name}, of which it has only a temporary copy: write between two steps, as "
            "in on_train_batch_end, or write to a buffer instead (register_buffer)"
        )
