"""Placeholders: what stands in a module's parameters during a step, while the parameters themselves are on the host."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_decentral.spilled.compute.blocks import ParameterPlace
from lightning_decentral.spilled.compute.prefetch import Loader
from lightning_decentral.spilled.compute.spill import Resident, Spilling
from lightning_decentral.spilled.compute.written import refuse_unlike, refuse_written, versions


class Standing:
    """No numbers where blocks are loaded by themselves, and a copy for the whole step where a parameter is resident.

    Attributes:
        absent: by storage, names of the parameters without numbers.
    """

    def __init__(self, places: Sequence[ParameterPlace], blocks: Sequence[Spilling], device: torch.device) -> None:
        loaded = {name for block in blocks for name in block.parameters}
        self._hollow = {place.name: _hollow(place.held, device) for place in places if place.name in loaded}
        # By storage, which `expand` keeps.
        self.absent = {base.untyped_storage()._cdata: name for name, base in self._hollow.items()}

    def fill(self, loader: Loader) -> Mapping[str, Tensor]:
        """Stand-ins for the loader's parameters, by name; call `look` where the step's forward ends."""
        apply: Callable[[Loader, Tensor], Tensor] = Resident.apply
        self._loader = loader
        self._stay = {n: apply(loader, host) for n, host in loader.hosts.items() if n not in self._hollow}
        self._away = {
            name: base.expand(loader.hosts[name].shape).requires_grad_(loader.hosts[name].requires_grad)
            for name, base in self._hollow.items()
        }
        standing = {**self._away, **self._stay}
        self._versions = versions(standing)
        return standing

    def look(self) -> None:
        """The host's parameters are frozen and thawed as what stood for them, which isn't held any longer.

        Raises:
            ValueError: somebody wrote to what stood there.
        """
        hosts, standing = self._loader.hosts, {**self._away, **self._stay}
        for name, tensor in self._away.items():
            hosts[name].requires_grad_(tensor.requires_grad)
        for name, copy in self._stay.items():
            if copy.requires_grad and not hosts[name].requires_grad:
                self._thaw(copy, hosts[name])
        refuse_written("a step", standing, self._versions)
        if self._loader.checks:
            refuse_unlike("a step", self._stay, hosts)
        self._away, self._stay = {}, {}

    def _thaw(self, copy: Tensor, host: Tensor) -> None:
        """The gradient of this copy, which was made for a frozen parameter, is the host's."""
        host.requires_grad_(True)

        def add(gradient: Tensor) -> None:
            (landed,) = self._loader.device.send([gradient], [host]).land()
            host.grad = landed if host.grad is None else host.grad + landed

        copy.register_hook(add)


def _hollow(parameter: Tensor, place: torch.device) -> Tensor:
    """Scalar NaN (0 for integers) of a parameter's type and place, to be expanded: a wrong use of it shows."""
    numbers = parameter.is_floating_point() or parameter.is_complex()
    return torch.full((), float("nan") if numbers else 0, dtype=parameter.dtype, device=place)
