"""Islands of several devices (FSDP) under Lightning: checks of the module, saving and restoring sharded models."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import grads
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from lightning_decentral.gossip.island import FullyShard, Island
from lightning_decentral.gossip.wire.island_member import IslandMember, inside
from lightning_decentral.shared.checkpoint.resuming_replicas import WholeModel
from lightning_decentral.shared.evaluation import callbacks_of
from lightning_decentral.shared.wire.fsdp import WholeScalars, full_tensor, like, local, mapped, own_part
from lightning_decentral.shared.wire.transport import Wire


def joined(island: Island, strategy: "OnIsland", wire: Wire) -> IslandMember:
    """Join this device to its island and shard the module. Must run before the optimizers exist: FSDP replaces the
    module's parameters."""
    module = strategy._module
    refuse_unsharded(island, module, callbacks_of(module.trainer), strategy.precision_plugin)
    member = island.join(wire, strategy.root_device, strategy.meet)
    member.guard(getattr(strategy.precision_plugin, "scaler", None))
    member.arrange(module)
    return member


def refuse_unsharded(island: Island, module: LightningModule, callbacks: list[Callback], precision: Precision) -> None:
    """Raise ValueError for modules and callbacks that would silently compute wrong results on sharded parameters."""
    if island.shards == 1:
        return
    if isinstance(island, FullyShard) and island.param_dtype:
        _refuse_bf16(island, module, precision)
    # A device's scaler would skip an update by itself.
    if getattr(precision, "scaler", None) is not None:
        raise ValueError(
            f"precision 16-mixed scales the loss, and devices of {island!r} would skip different updates: "
            'use bf16-mixed, with param_dtype="bfloat16": without it each device keeps a copy of all weights in bf16'
        )
    if not module.automatic_optimization:
        raise ValueError(
            f"manual optimization runs the backward inside training_step, where {island!r} would lose the "
            "gradients: use AllReduce, or automatic optimization"
        )
    _refuse_types(island, module)
    for callback in callbacks:
        if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
            raise ValueError(f"{type(callback).__name__} copies whole models, {island!r} keeps shards: use AllReduce")
        if isinstance(callback, ModelPruning):
            raise ValueError(f"ModelPruning masks whole parameters, {island!r} keeps shards: use AllReduce")


def _refuse_bf16(island: Island, module: LightningModule, precision: Precision) -> None:
    if precision.precision != "bf16-mixed":
        raise ValueError(
            f"{island!r} needs autocast to compute in bf16, got precision={precision.precision}: use "
            "precision='bf16-mixed', or leave param_dtype out"
        )
    if any(isinstance(part, _BatchNorm) for part in module.modules()):
        raise ValueError(
            f"BatchNorm computes in float32, and {island!r} would give it bf16 weights: leave param_dtype out"
        )


def _refuse_types(island: Island, module: nn.Module) -> None:
    if any(parameter.is_complex() for parameter in module.parameters()):
        raise ValueError(
            f"{island!r} shards complex parameters, which torch's optimizers then update wrongly: keep real pairs as "
            "parameters and use torch.view_as_complex in the forward, or use AllReduce"
        )
    types = sorted({str(p.dtype) for p in module.parameters()})
    if len(types) > 1:
        raise ValueError(
            f"{island!r} needs parameters of one type, got {' and '.join(types)}: convert the module, or use AllReduce"
        )


class OnIsland(Protocol):
    """Interface of the strategy on one device of an island."""

    member: IslandMember  # This device as a member of its island.

    @property
    def _module(self) -> LightningModule: ...
    @property
    def keeps_wholes(self) -> bool: ...
    @property
    def precision_plugin(self) -> Precision: ...
    @property
    def root_device(self) -> torch.device: ...
    def meet(self, call: Callable[[], Any]) -> Any: ...


class IslandModel(WholeModel):
    """Saves and restores the model of a worker from one device of its island, which keeps all of it or a shard."""

    def __init__(self, island: Island, device: OnIsland, join_groups: Callable[[], Wire | None]) -> None:
        self._island, self._device, self._join_groups = island, device, join_groups
        self.layout = "" if island.devices == 1 else f"{type(island).__name__}({island.devices})"
        self._shards: Mapping[str, Tensor] | None = None

    @property
    def spread(self) -> bool:
        return self._island.shards > 1

    def whole(self, tree: dict[str, Any]) -> dict[str, Any]:
        # After the fit the model is whole, optimizer states are still sharded: this island's devices gather them.
        wire = self._join_groups() if self.spread and self._device.member.shards == 1 else None
        over = inside(wire.group, wire.world.size, self._island.devices) if wire else None

        def gathered(tensor: Tensor) -> Tensor:
            full = full_tensor(tensor, over)
            return full.cpu() if self._device.keeps_wholes else full[:0]  # all devices gather, one keeps the result

        whole: dict[str, Any] = mapped(gathered, tree)
        return whole

    def part(self, tree: dict[str, Any]) -> dict[str, Any]:
        parts: dict[str, Any] = mapped(lambda tensor: local(tensor).clone(), tree)
        return parts

    def restored(self, own: dict[str, Any], mean: Mapping[str, Any]) -> dict[str, Any]:
        if self._island.shards == 1:
            return own
        # The module is whole when Lightning loads it and takes the mean; the shards follow in `resume`.
        self._shards = own["state_dict"]
        return {**own, "state_dict": mean["state_dict"]}

    def take(self, module: nn.Module, mean: Mapping[str, Any]) -> None:
        if self._island.shards == 1:
            super().take(module, mean)
        else:
            held = module.state_dict()
            self._device.member.load(module, {name: own_part(whole, held[name]) for name, whole in mean.items()})

    def optimizers(
        self, optimizers: Sequence[Optimizer], checkpoint: Mapping[str, Any], own: bool
    ) -> Mapping[str, Any]:
        if self._device.member.shards == 1:
            return checkpoint
        pairs = zip(optimizers, checkpoint["optimizer_states"], strict=True)
        return {**checkpoint, "optimizer_states": [sharded_state(optimizer, state, own) for optimizer, state in pairs]}

    def resume(self) -> None:
        if self._shards is not None:
            self._device.member.load(self._device._module, self._shards)
            self._shards = None


class WholeMatrices:
    """Gathers sharded matrices for Muon's orthogonalization until `close`, and values for hooks that read a scalar of a
    shard and for Lightning's grad_norm."""

    def __init__(self, optimizers: Sequence[Optimizer], member: IslandMember) -> None:
        self._muons: list[Any] = []
        self._served: list[Any] = []
        if member.shards == 1:
            return
        from lightning_decentral.optim.muon import Muon  # no other run reads them
        from lightning_decentral.shared.compute.around import Redirected

        self._served = [WholeScalars(), Redirected(grads.grad_norm, _grad_norm)]
        self._muons = [optimizer for optimizer in optimizers if isinstance(optimizer, Muon)]
        for muon in self._muons:
            # An instance attribute hides the method of the class: `close` only has to delete it.
            muon.change = member.change

    def close(self) -> None:
        for served in self._served:
            served.close()
        self._served = []
        for muon in self._muons:
            vars(muon).pop("change", None)


def _grad_norm(
    _: Callable[..., Any], module: nn.Module, norm_type: float | str, group_separator: str = "/"
) -> dict[str, Any]:
    """Gradient norms as Lightning's `grad_norm`, whose `torch.tensor` takes no shards. Collective."""
    p = float(norm_type)
    if p <= 0:
        raise ValueError(f"`norm_type` must be a positive number or 'inf' (infinity norm). Got {p}")
    found = [(name, parameter.grad) for name, parameter in module.named_parameters() if parameter.grad is not None]
    norms = {f"grad_{p}_norm{group_separator}{name}": full_tensor(grad.detach().norm(p)) for name, grad in found}
    return {**norms, f"grad_{p}_norm_total": torch.stack(list(norms.values())).norm(p)} if norms else norms


def sharded_state(optimizer: Optimizer, state: dict[str, Any], own: bool) -> dict[str, Any]:
    """Shard a saved optimizer state: moments as their parameters are. `own`: the state is a shard already."""

    def placed(value: Any, parameter: nn.Parameter) -> Any:
        if not isinstance(value, Tensor) or value.dim() != parameter.dim():
            return value  # a step count
        return like(parameter, (value if own else own_part(value, parameter).clone()).to(parameter.device))

    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    rows = {
        n: {key: placed(value, p) for key, value in state["state"].get(n, {}).items()}
        for n, p in zip(numbers, parameters, strict=True)
    }
    return {**state, "state": {n: row for n, row in rows.items() if row}}
