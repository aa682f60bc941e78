"""Offloading engine: a module whose parameters live on the host, and its steps within a budget of bytes on the device.

The first step of every kind is measured block by block and checked, the second one timed; from the third on the shards
of a plan are loaded one ahead. Between steps the module is as it was: its parameters are the host's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_decentral.spilled.compute.blocks import find, placed, places
from lightning_decentral.spilled.compute.memory_ledger import Counting
from lightning_decentral.spilled.compute.prefetch import Loader, Route, Singly
from lightning_decentral.spilled.compute.spill import Resident, Spilling, spilled
from lightning_decentral.spilled.compute.step_profile import Log, Unmeasured, joined
from lightning_decentral.spilled.compute.transfer import Device
from lightning_decentral.spilled.plan.footprint import BlockFootprint, Footprint
from lightning_decentral.spilled.plan.shards import ShardPlan, plan

Announce = Callable[[str, ShardPlan], None]


class Engine:
    """Takes the place of the calls of a module's blocks, until `detach`.

    Args:
        budget_bytes: of the device, for everything.
        blocks: "auto", or names of modules.
        resident: names of modules and parameters whose copies stay on the device during a whole step.
        announce: told every plan, with the kind of its step.

    Raises:
        ValueError: see `blocks.find`; a block that is compiled, or larger than the budget.

    Attributes:
        plans: by the kind of step.
    """

    def __init__(
        self,
        module: nn.Module,
        device: Device,
        budget_bytes: int,
        *,
        blocks: str | Sequence[str] = "auto",
        resident: Sequence[str] = (),
        announce: Announce = lambda kind, plan: None,
    ) -> None:
        names = find(module, blocks, resident)
        self.device = device
        self.plans: dict[str, ShardPlan] = {}
        self._module, self._budget_bytes, self._announce = module, budget_bytes, announce
        self._places = places(module)
        self._spilling = [self._block(index, name) for index, name in enumerate(names)]
        self._refuse_compiled()
        self._loader = Loader(device, [block.parameters for block in self._spilling])
        self._first: dict[str, Footprint] = {}
        self._trained: list[bool] = []
        self._kind = ""
        self._log: Log | None = None
        self._look()
        self._refuse_large()
        self._pin()
        self._hollow = {place.name: _hollow(place.held, device.place) for place in self._places}
        # By storage, which `expand` keeps.
        self._absent = {base.untyped_storage()._cdata: name for name, base in self._hollow.items()}
        for block in self._spilling:
            # What torch calls in place of _call_impl, which `spilled` calls in turn: hooks run where they did.
            block.module._compiled_call_impl = spilled(block, self._loader)

    def _block(self, index: int, name: str) -> Spilling:
        module = self._module.get_submodule(name)
        inside = set(module.modules())
        return Spilling(index, name, module, tuple(place for place in self._places if place.module in inside))

    def _refuse_compiled(self) -> None:
        for name, module in self._module.named_modules():
            if module._compiled_call_impl is not None or "_orig_mod" in module._modules:
                raise ValueError(
                    f"{name or type(module).__name__} is compiled, and compiled code doesn't see that its parameters "
                    "come and go: train the module without torch.compile"
                )

    def _refuse_large(self) -> None:
        for block in self._blocks():
            if block.parameter_bytes > self._budget_bytes:
                raise ValueError(
                    f"block {block.name} has {block.parameter_bytes} bytes of parameters alone, "
                    f"memory_bytes={self._budget_bytes}: give more memory_bytes, or smaller blocks (blocks=[names])"
                )

    def _pin(self) -> None:
        for place in self._places:
            place.held.data = self.device.pinned(place.held.data)  # optimizers go on holding the parameter

    def detach(self) -> None:
        """The module without a trace of this."""
        for block in self._spilling:
            block.module._compiled_call_impl = None
        self._loader.end()

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        return self._loader.hosts

    # ---- steps --------------------------------------------------------------------------------------------------

    @contextmanager
    def step(self, kind: str, given: Any, backward: bool = False) -> Iterator[None]:
        """What runs in here finds each block's parameters on the device while it runs, and no others but the resident.

        Args:
            kind: "training", ...; each has its own plan.
            given: the batch.
            backward: whether `finish` is called later, behind the backward.
        """
        self._begin(kind, given)
        with self.counting(), placed(self._places, self._standing()):
            yield
        if not backward:
            self.finish()

    def counting(self) -> AbstractContextManager[Any]:
        """Bytes are counted within, in the first step of every kind."""
        return Counting(self.device.ledger, self._absent) if self._loader.checks else nullcontext()

    def finish(self) -> None:
        """A step has ended: what was measured becomes a plan."""
        self._loader.end()
        log, self._log = self._log, None
        if log is not None:
            self._planned(log.footprint(self._blocks()))

    def _look(self) -> None:
        """The parameters may be others than at the last step; if others are trained, a step has other bytes."""
        self._loader.hosts = {place.name: place.held for place in self._places}
        trained = [host.requires_grad for host in self._loader.hosts.values()]
        if trained != self._trained:
            self._trained, self.plans, self._first = trained, {}, {}

    def _begin(self, kind: str, given: Any) -> None:
        self._look()
        hosts = list(self._loader.hosts.values())
        self.device.note([*hosts, *(host.grad for host in hosts)], [*self._module.buffers(), *tree_leaves(given)])
        found, self._kind = self.plans.get(kind), kind
        if found is None:
            self._loader.begin(Singly(), Unmeasured(), None)
            # The first step of a kind is checked, which takes time: the second one is timed.
            self._log = Log(self.device, checks=kind not in self._first)
            self._loader.log = self._log
        else:
            self._loader.begin(Route(found), Unmeasured(), found.shards[found.route[0]] if found.route else None)

    def _standing(self) -> dict[str, Tensor]:
        """What stands in all places during a step."""
        loaded = {name for block in self._spilling for name in block.parameters}
        hosts = self._loader.hosts
        apply: Callable[[Loader, Tensor], Tensor] = Resident.apply
        stays = {name: apply(self._loader, host) for name, host in hosts.items() if name not in loaded}
        away = {name: self._hollow[name].expand(host.shape) for name, host in hosts.items() if name in loaded}
        return {**away, **stays}

    def _planned(self, footprint: Footprint) -> None:
        first = self._first.pop(self._kind, None)
        if first is None:
            plan(footprint, self._budget_bytes)  # refuses at once what can't fit
            self._first[self._kind] = footprint
            return
        both = joined(first, footprint)
        if both is not None:  # else the next step is a first one again
            self.plans[self._kind] = plan(both, self._budget_bytes)
            self._announce(self._kind, self.plans[self._kind])

    def _blocks(self) -> list[BlockFootprint]:
        hosts = self._loader.hosts
        sizes = {name: host.numel() * host.element_size() for name, host in hosts.items()}
        return [
            BlockFootprint(block.name, {name: sizes[name] for name in block.parameters}) for block in self._spilling
        ]


def _hollow(parameter: Tensor, place: torch.device) -> Tensor:
    """No number, of a parameter's type and place, to be expanded: whoever computes with it sees it."""
    numbers = parameter.is_floating_point() or parameter.is_complex()
    return torch.full((), float("nan") if numbers else 0, dtype=parameter.dtype, device=place)
