"""Offloading engine: runs a module whose parameters live on the host, within a memory budget of the device.

The first step of every kind is measured block by block and checked, the second is timed; from the third on, a plan's
shards are loaded one ahead. Between steps the module is unchanged: its parameters are the host's. If a step finds
other parameters (pruned, reparametrized, tied, replaced), blocks and measurements begin anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_decentral.spilled.compute import blocks as block_places
from lightning_decentral.spilled.compute.blocks import ParameterPlace, placed, places
from lightning_decentral.spilled.compute.prefetch import Loader, joined
from lightning_decentral.spilled.compute.recompute import first_order
from lightning_decentral.spilled.compute.spill import Spilling, spilled
from lightning_decentral.spilled.compute.transfer import Counting, OffloadDevice
from lightning_decentral.spilled.plan.shards import BlockFootprint, Footprint, ShardPlan, plan

Announce = Callable[[str, ShardPlan], None]


class Engine:
    """Replaces the calls of a module's blocks by offloaded ones, until `detach`. ValueError: see `blocks.find`; also
    for a block that is compiled, or larger than the budget."""

    def __init__(
        self,
        module: nn.Module,
        device: OffloadDevice,
        budget_bytes: int,  # total memory budget on the device
        *,
        blocks: str | Sequence[str] = "auto",  # "auto", or names of modules
        resident: Sequence[str] = (),  # modules and parameters whose copies stay on the device during a whole step
        announce: Announce = lambda kind, plan: None,  # called with every plan and the kind of its step
    ) -> None:
        self.device = device
        self.plans: dict[str, ShardPlan] = {}  # plans by kind of step
        self._module, self._budget_bytes, self._announce = module, budget_bytes, announce
        self._wished = blocks, resident
        self._spilling: list[Spilling] = []
        self._first: dict[str, Footprint] = {}  # by kind: first measurements, not yet timed
        self._kind = ""
        self._arrange(places(module))

    def _renew(self) -> None:
        """Update the blocks if the module's parameters, or their places, have changed since the last step."""
        found = places(self._module)
        if found != self._places:
            self._arrange(found)
        self._look()

    def _arrange(self, found: list[ParameterPlace]) -> None:
        self._release()
        self._places, self._trained, self._spilling = found, list[tuple[bool, torch.Size]](), []
        for index, name in enumerate(block_places.find(self._module, *self._wished)):
            inside = set((module := self._module.get_submodule(name)).modules())
            own = tuple(place for place in found if place.module in inside)
            self._spilling.append(Spilling(index, name, module, own))
        for name, part in self._module.named_modules():
            around = vars(part).get("_compiler_ctx")  # set by LightningModule.compile
            if around or part._compiled_call_impl is not None or "_orig_mod" in part._modules:
                raise ValueError(
                    f"{name or type(part).__name__} is compiled, but compiled code doesn't see that its parameters "
                    "are loaded and removed: train the module without torch.compile"
                )
        self._loader = Loader(self.device, [block.parameters for block in self._spilling])
        self._standing = Standing(found, self._spilling, self.device.place)
        self._look()
        for large in (one for one in self._blocks() if one.parameter_bytes > self._budget_bytes):
            raise ValueError(
                f"block {large.name} has {large.parameter_bytes} bytes of parameters alone, "
                f"memory_bytes={self._budget_bytes}: give more memory_bytes, or smaller blocks (blocks=[names])"
            )
        block_places.move_buffers(self._module, self.device.place)
        for place in found:
            place.held.data = self.device.pinned(place.held.data)  # optimizers keep the same parameter object
        for block in self._spilling:
            # torch calls this instead of _call_impl, and `spilled` calls _call_impl in turn: hooks run as before.
            block.module._compiled_call_impl = self._called(block)

    def _called(self, block: Spilling) -> Callable[..., Any]:
        within = spilled(block, self._loader)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._loader.in_step:
                return within(*args, **kwargs)
            self._renew()
            module = block.module  # the block may have been replaced or removed
            again = module._compiled_call_impl
            return (within if again is call else again or module._call_impl)(*args, **kwargs)  # outside of a step

        return call

    def _release(self) -> None:
        for block in self._spilling:
            block.module._compiled_call_impl = None

    def detach(self) -> None:
        """Restore the module as it was before."""
        self._release()
        self._loader.end()

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        return self._loader.hosts

    @contextmanager
    def step(self, kind: str, given: Any, backward: bool = False) -> Iterator[None]:
        """Run a step: each block's parameters are on the device only while it runs, resident ones always. `kind`:
        "training", ...; each has its own plan. `given`: the batch. `backward`: whether `finish` is called later, after
        the backward."""
        self._renew()
        hosts = list(self._loader.hosts.values())
        self.device.note([*hosts, *(host.grad for host in hosts)], [*self._module.buffers(), *tree_leaves(given)])
        self._kind = kind
        # The first step of a kind is checked, which takes time, so the second is timed.
        self._loader.begin(self.plans.get(kind), checks=kind not in self._first)
        with self.counting(), placed(self._places, self._standing.fill(self._loader)):
            yield
            stood = {(place.module, place.attribute) for place in self._places}
            for place in places(self._module):
                if (place.module, place.attribute) not in stood:
                    raise block_places.moved(place.name)
            self._standing.look()
        if not backward:
            self.finish()

    def counting(self) -> AbstractContextManager[Any]:
        """Count bytes in this context, in the first step of every kind."""
        return Counting(self.device.ledger, self._standing.absent) if self._loader.checks else nullcontext()

    def finish(self) -> None:
        """End a step: turn its measurements into a plan."""
        log = self._loader.log
        self._loader.end()
        if log is None:
            return
        first, footprint = self._first.pop(self._kind, None), log.footprint(self._blocks())
        if first is None:
            plan(footprint, self._budget_bytes)  # raises at once if nothing fits
            self._first[self._kind] = footprint
        elif both := joined(first, footprint):  # otherwise the next step counts as the first one
            self.plans[self._kind] = plan(both, self._budget_bytes)
            self._announce(self._kind, self.plans[self._kind])

    def _look(self) -> None:
        """Check for changed parameters since the last step; if others are trained, a step has other bytes."""
        self._loader.hosts = {place.name: place.held for place in self._places}
        trained = [(host.requires_grad, host.shape) for host in self._loader.hosts.values()]
        if trained != self._trained:
            self._trained, self.plans, self._first = trained, {}, {}

    def _blocks(self) -> list[BlockFootprint]:
        hosts = self._loader.hosts
        sizes = {name: host.numel() * host.element_size() for name, host in hosts.items()}
        return [
            BlockFootprint(block.name, {name: sizes[name] for name in block.parameters}) for block in self._spilling
        ]


class Standing:
    """Stand-ins for parameters during a step: empty ones for offloaded blocks, copies for resident parameters."""

    def __init__(self, places: Sequence[ParameterPlace], blocks: Sequence[Spilling], device: torch.device) -> None:
        loaded = {name for block in blocks for name in block.parameters}
        self._hollow: dict[str, Tensor] = {}
        for name, held in ((place.name, place.held) for place in places if place.name in loaded):
            # Scalar NaN (0 for integers), expanded: wrong use shows. (): a few bytes.
            nothing = float("nan") if held.is_floating_point() or held.is_complex() else 0
            self._hollow[name] = torch.full((), nothing, dtype=held.dtype, device=device)
        # By storage, which `expand` keeps: names of the parameters without values.
        self.absent = {base.untyped_storage()._cdata: name for name, base in self._hollow.items()}

    def fill(self, loader: Loader) -> Mapping[str, Tensor]:
        """Return stand-ins for the loader's parameters, by name; call `look` at the end of the step's forward."""
        apply: Callable[[Loader, Tensor], Tensor] = Resident.apply
        self._loader = loader
        self._tensors = {
            name: self._hollow[name].expand(host.shape).requires_grad_(host.requires_grad)
            if name in self._hollow
            else apply(loader, host)
            for name, host in loader.hosts.items()
        }
        self._versions = block_places.versions(self._tensors)
        return self._tensors

    def look(self) -> None:
        """Freeze or thaw the host's parameters like their stand-ins, which are then freed. ValueError: code wrote to
        a stand-in."""
        hosts = self._loader.hosts
        for name, tensor in self._tensors.items():
            if name in self._hollow:
                hosts[name].requires_grad_(tensor.requires_grad)
            elif tensor.requires_grad and not hosts[name].requires_grad:
                # The gradient of this copy of a frozen parameter belongs to the host's parameter.
                hosts[name].requires_grad_(True)
                tensor.register_hook(partial(self._add, hosts[name]))
        stay = self._tensors.keys() - self._hollow.keys() if self._loader.checks else ()
        block_places.refuse_written("a step", self._tensors, self._versions, {name: hosts[name] for name in stay})
        self._tensors = {}

    def _add(self, host: Tensor, gradient: Tensor) -> None:
        (landed,) = self._loader.device.send([gradient], [host]).land()
        host.grad = landed if host.grad is None else host.grad + landed


class Resident(torch.autograd.Function):
    """Copy of a parameter that stays on the device during the step; its gradient is sent to the host."""

    @staticmethod
    def forward(ctx: Any, loader: Loader, host: Tensor) -> Tensor:
        ctx.device = loader.device
        return loader.device.fetch([host]).ready()[0]

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, ctx.device.send([gradient]).land()[0]
