"""FSDP2 (`fully_shard`): parameters in shards on several devices, and operations on their DTensors.

Except for `transport` only this module sends by torch.distributed: FSDP sends and waits by itself inside an island (a
worker of several devices)."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import _composable_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from lightning_decentral.shared.compute.buckets import Bucket
from lightning_decentral.shared.compute.layout import Place
from lightning_decentral.shared.wire.transport import Transport

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def refuse_sharded(module: nn.Module) -> None:
    """Raise ValueError where the user has sharded the module already: its shards would be taken for replicas."""
    for name, part in module.named_modules():
        sharded = any(isinstance(p, DTensor) for p in part.parameters(recurse=False))
        if sharded or isinstance(part, FSDPModule | FullyShardedDataParallel):
            raise ValueError(
                f"{name or type(module).__name__} is already wrapped by FSDP: leave out fully_shard and FSDP, and let "
                "island=FullyShard(devices) shard the model"
            )


@dataclass
class Sharded:
    """Shards a module's parameters, p = [p_0, ..., p_(L-1)] along the first dimension, until `undo`.

    Each module in a ModuleList is gathered by itself, everything else together; names, hooks and the module's methods
    don't change."""

    module: nn.Module
    over: Transport  # mesh of the devices that hold the shards
    device: torch.device
    compute: torch.dtype | None = None  # type of gathered parameters; gradients are summed in float32
    _before: list[tuple[nn.Module, tuple[type, set[str], dict[str, set[int]]]]] = field(init=False)  # names, hooks

    def __post_init__(self) -> None:
        self._mesh = mesh = _mesh(self.over, self.device.type)
        # A list, no dictionary: a torchmetrics metric hashes its state, which changes.
        self._before = [(m, (type(m), set(m.__dict__), _hook_ids(m))) for m in self.module.modules()]
        # Autocast takes a weight that is bf16 already as it is, so that no copy is kept until the backward. Inputs are
        # left to it.
        reduce = torch.float32 if self.compute else None
        policy = MixedPrecisionPolicy(param_dtype=self.compute, reduce_dtype=reduce, cast_forward_inputs=False)
        for block in _blocks(self.module):
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(self.module, mesh=mesh, mp_policy=policy)
        self.root._get_fsdp_state()._lazy_init()  # from here on the module has all of FSDP's hooks
        self._added = [_hook_ids(m) for m, _ in self._before]
        self._laid_out = {name for name, _ in self.module.named_parameters()}

    @property
    def root(self) -> FSDPModule:
        assert isinstance(self.module, FSDPModule)
        return self.module

    def reshard(self) -> None:
        """Free parameters that a forward pass gathered and no backward pass freed, so that the module has shards."""
        for part in self.module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    @torch.no_grad()
    def undo(self) -> None:
        """Turn the module back into a plain one, with whole parameters on the host. Collective."""
        self.reshard()
        whole: dict[int, nn.Parameter] = {}  # by identity: tied parameters are tied again
        for part, _ in self._before:
            for name, parameter in part.named_parameters(recurse=False):
                if id(parameter) not in whole:
                    full = full_tensor(parameter).cpu()  # one device may have too little memory for the whole model
                    whole[id(parameter)] = nn.Parameter(full, requires_grad=parameter.requires_grad)
                part._parameters[name] = whole[id(parameter)]
        self.abandon()

    @property
    def groups(self) -> list[Any]:
        """FSDP's groups of parameters that are gathered and reduced together."""
        states = [vars(part._get_fsdp_state()) for part in self.module.modules() if isinstance(part, FSDPModule)]
        # An older torch has one group in a module.
        several = [state.get("_fsdp_param_groups") or [state.get("_fsdp_param_group")] for state in states]
        return [group for groups in several for group in groups if group is not None]

    def changed(self) -> str:
        """Return the name of the first parameter that was added after sharding; empty where there is none."""
        return next((name for name, _ in self.module.named_parameters() if name not in self._laid_out), "")

    def abandon(self) -> None:
        """Turn the module back into a plain one after an exception, with shards where they weren't gathered."""
        for (part, (kind, names, hooks)), added in zip(self._before, self._added, strict=True):
            for where in _HOOKS:  # hooks that other code has added since stay
                for number in added[where] - hooks[where]:
                    getattr(part, where).pop(number, None)
            if isinstance(part, FSDPModule):
                part.__class__ = kind
                _composable_state._module_state_mapping.pop(part, None)
            for name in [n for n in part.__dict__ if n not in names and ("composable" in n or "_fsdp_" in n)]:
                del part.__dict__[name]
        # torch keeps groups in other places, too: DTensor caches meshes for ever, and with them the sockets of a group
        # that has ended.
        vars(self._mesh).get("_pg_registry", {}).clear()
        gc.collect()  # and FSDP's objects refer to each other and to the group


def _mesh(over: Transport, device: str) -> DeviceMesh:
    # A unique name: DTensor caches by equal meshes, and would give tensors the mesh of an earlier fit, whose group has
    # ended.
    return DeviceMesh.from_group(over.group, device, mesh_dim_names=(f"island {over.group.group_name}",))


def _hook_ids(module: nn.Module) -> dict[str, set[int]]:
    return {name: set(getattr(module, name)) for name in _HOOKS}


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules in outermost ModuleLists that share no parameter with the rest."""
    for child in module.children():
        if not isinstance(child, nn.ModuleList):
            yield from _blocks(child)
            continue
        for block in child:
            own, inside = set(block.parameters()), set(block.modules())
            outside = (part for part in module.modules() if part not in inside)
            if own and not any(p in own for part in outside for p in part.parameters(recurse=False)):
                yield block


# ---- tensors ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """Return this device's shard of a tensor, or the tensor if it isn't sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_sharded(tensor: Tensor) -> bool:
    """Return whether the tensor is a shard, of which other devices hold the rest."""
    return isinstance(tensor, DTensor)


def shards(tensor: Tensor) -> int:
    """Return the number of devices over which a tensor is sharded."""
    return tensor.device_mesh.size() if isinstance(tensor, DTensor) else 1  # a mesh is one worker's devices


def like(tensor: Tensor, shard: Tensor) -> Tensor:
    """Return a tensor like `tensor` with `shard` as this device's shard; `shard` itself if `tensor` isn't sharded."""
    if not isinstance(tensor, DTensor):
        return shard
    return DTensor.from_local(
        shard, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


@torch.no_grad()
def full_tensor(tensor: Tensor, over: Transport | None = None) -> Tensor:
    """Return the whole tensor; collective where it is sharded. `over`: the group of the devices that hold the shards,
    where the group over which they were made has been destroyed."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    if over is not None:
        mesh = _mesh(over, tensor.device_mesh.device_type)
        shape, stride, shard = tensor.shape, tensor.stride(), tensor.to_local()
        tensor = DTensor.from_local(shard, mesh, tensor.placements, run_check=False, shape=shape, stride=stride)
    return tensor.full_tensor()


def own_part(whole: Tensor, parameter: Tensor) -> Tensor:
    """Return this device's rows of a tensor of the sharded parameter's shape; any other tensor unchanged."""
    if not isinstance(parameter, DTensor) or whole.shape != parameter.shape:
        return whole
    mesh = parameter.device_mesh
    return rows_of(whole, mesh.get_local_rank(), mesh.size())


def rows_of(whole: Tensor, place: int, devices: int) -> Tensor:  # (rows, ...) -> (at most ceil(rows / devices), ...)
    """Return the rows that device number `place` of `devices` holds; a view."""
    rows = whole.chunk(devices, dim=0)
    return rows[place] if place < len(rows) else whole[:0]  # fewer rows than devices


def mapped(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Apply the function to every sharded tensor in nested dictionaries and lists."""
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, DTensor) else leaf, tree)


class WholeScalars:
    """Patches `float(x)` and `x.item()` until `close`: of a sharded scalar (a sum of squares) they return the
    value over all devices. Collective where a device doesn't know that value."""

    _open = 0

    def __init__(self) -> None:
        self._closed = False
        WholeScalars._open += 1
        _HANDLERS[_SCALAR] = lambda _, args, kwargs: full_tensor(args[0]).item()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            WholeScalars._open -= 1
            if not WholeScalars._open:
                _HANDLERS.pop(_SCALAR, None)


_SCALAR = torch.ops.aten._local_scalar_dense.default
_HANDLERS: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers


class ShardBucket(Bucket):
    """Bucket of shards, whose storage is FSDP's: `adopt` reads them into the copy `flat`, `store` writes them back."""

    def elements(self, parameter: nn.Parameter) -> int:
        return local(parameter).numel()

    def lies(self, parameter: nn.Parameter) -> Place:
        return Place.row_major(local(parameter))

    @torch.no_grad()
    def adopt(self) -> None:
        parts, shards = self._pairs()
        torch._foreach_copy_(parts, shards)

    @torch.no_grad()
    def store(self) -> None:
        parts, shards = self._pairs()
        torch._foreach_copy_(shards, parts)

    def release(self) -> None:
        """Do nothing: the shards' storage is FSDP's."""

    def _pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return (views of `flat`, the shards whose values these hold)."""
        shards = [local(parameter) for parameter in self.parameters]
        places = zip(self._offsets, shards, strict=True)
        return [self.flat[at : at + shard.numel()].view(shard.shape) for at, shard in places], shards
