"""Device of a sharded island (FSDP2): shards of parameters, and zeros for gradients of unused parameters."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_decentral.gossip.wire.island_member import InPlace, Mean, Meet, Several, inside
from lightning_decentral.shared.compute.buckets import Bucket, pack
from lightning_decentral.shared.compute.layout import is_row_major, same
from lightning_decentral.shared.wire.fsdp import ShardBucket, Sharded, is_sharded, like, local
from lightning_decentral.shared.wire.mean import mean
from lightning_decentral.shared.wire.pending import Pending
from lightning_decentral.shared.wire.transport import Wire


class Sharding(Several):
    """Device of an island that keeps one shard of the parameters (FSDP2)."""

    def __init__(self, wire: Wire, devices: int, device: torch.device, meet: Meet, compute: torch.dtype | None) -> None:
        super().__init__(wire, devices, meet)
        self.shards, self._compute = devices, compute
        self._device, self._inside = device, inside(wire.group, wire.world.size, devices)
        across = self.peers([range(wire.world.size // devices)])
        assert across is not None
        self._across, self._hosts = across, inside(wire.hosts, wire.world.size, devices)
        self._sharded: Sharded | None = None
        self._used: Any = None
        self._counts: list[Pending] = []
        self._trains: dict[str, nn.Parameter] = {}

    def pack(self, parameters: Sequence[nn.Parameter], bucket_bytes: int | None) -> list[Bucket]:
        return pack(parameters, bucket_bytes and bucket_bytes * self.devices, ShardBucket)

    def alike(self, parameters: Sequence[nn.Parameter], take: Callable[[Sequence[nn.Parameter]], None]) -> None:
        if not all(map(is_sharded, parameters)):
            raise RuntimeError(
                "a parameter added during training isn't sharded, as FullyShard shards modules before the optimizers "
                "exist: make all modules in configure_model, or use AllReduce"
            )

    def arrange(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            if not is_row_major(parameter.shape, parameter.stride()):
                raise ValueError(
                    f"FullyShard shards contiguous parameters by rows, and {name} has strides {parameter.stride()}: "
                    "convert the model to torch.contiguous_format, or use AllReduce"
                )
        self._sharded = Sharded(module, self._inside, self._device, self._compute)
        self._used = Used(self._sharded.groups)

    def train(self, module: nn.Module, step: Callable[[], Any], redirect: Callable[[], Any]) -> Any:
        self.rest()
        # FSDP reduces the gradients of trained parameters, and needs the same number on every device.
        self.layouts.done()
        before, now = self._trains, {name: p for name, p in module.named_parameters() if p.requires_grad}
        if before and not ([*before] == [*now] and same([*before.values()], [*now.values()])):
            self.layouts.changed()
        self._trains = now
        self.layouts.begin()
        try:
            # In the module's own call, where FSDP gathers parameters, which waits for the other devices.
            return self._meet(redirect)
        except RuntimeError as error:
            new = self._sharded.changed() if self._sharded is not None else ""
            if not new:
                raise
            raise RuntimeError(
                f"the parameter {new} was added during training, but FullyShard shards modules at the start: prune, "
                "reparametrize and add modules before fit, or use AllReduce"
            ) from error

    def evaluate(self, step: Callable[[], Any], redirect: Callable[[], Any]) -> Any:
        # No backward follows, which would free what the forward gathered.
        output = redirect()
        self.rest()
        return output

    def after(self) -> None:
        if self._used is not None:
            self._meet(partial(self._used.settle, self._counted))

    def _counted(self, flags: Tensor) -> Callable[[], object]:
        # Sums that nobody waits for are kept: backends write into them.
        self._counts = [*self._counts[-31:], pending := self._hosts.all_reduce(flags)]
        return pending.wait

    @contextmanager
    def blocked(self) -> Iterator[None]:
        assert self._sharded is not None
        # Unsharded gradients are kept meanwhile.
        self._sharded.root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._sharded.root.set_requires_gradient_sync(True)

    def change(self, tensors: Sequence[Tensor], change: InPlace) -> None:
        from lightning_decentral.shared.wire.owners import each_once  # no other run reads it

        shapes = [tuple(tensor.shape) for tensor in tensors]
        self._meet(lambda: each_once(change, [local(tensor) for tensor in tensors], shapes, self._inside))

    def close(self, cut_off: bool) -> None:
        super().close(cut_off)
        if self._sharded is not None:
            # Whole parameters come from all devices of the island.
            (self._sharded.abandon if cut_off else self._sharded.undo)()
        self._sharded = self._used = None

    def explain(self, error: BaseException) -> None:
        if "mixed torch.Tensor and DTensor" in str(error):
            warnings.warn(
                "under FullyShard a parameter and its gradient are shards (DTensors): convert a mask by "
                "torch.distributed.tensor.distribute_tensor(mask, p.device_mesh, p.placements), or use AllReduce",
                stacklevel=2,
            )

    def rest(self) -> None:
        if self._sharded is not None:
            self._sharded.reshard()

    def mean(self, tensors: Sequence[Tensor], of_all: Mean) -> list[Tensor]:
        # Shards over the devices with the same shards, all else over all devices.
        shards = iter(self.mean_of_buckets([local(t) for t in tensors if is_sharded(t)], of_all))
        whole = iter(of_all([t for t in tensors if not is_sharded(t)]))
        return [like(t, next(shards)) if is_sharded(t) else next(whole) for t in tensors]

    def mean_of_buckets(self, tensors: Sequence[Tensor], of_all: Mean) -> list[Tensor]:
        means: list[Tensor] = self._meet(lambda: mean(tensors, self._across))
        return means

    @torch.no_grad()
    def load(self, module: nn.Module, shards: Mapping[str, Tensor]) -> None:
        for name, tensor in module.state_dict().items():
            if isinstance(tensor, Tensor):
                local(tensor).copy_(shards[name])


class Used:
    """Adds zero gradients for parameters that only some devices of an island use in a step (experts). FSDP reduces a
    module's gradients in one message, whose size would differ on a device without some gradients. A parameter that no
    device used gets no gradient, as under ddp with find_unused_parameters. `groups`: FSDP's groups of parameters that
    are gathered and reduced together."""

    def __init__(self, groups: Sequence[Any]) -> None:
        self._groups = groups
        self._used, self._filled = set[nn.Parameter](), set[nn.Parameter]()
        for group in self._groups:
            group.post_backward = partial(self._fill, group, group.post_backward)

    def _fill(self, group: Any, post_backward: Callable[..., None], *args: Any) -> None:
        """Add zero gradients for unused parameters, then reduce the module's gradients."""
        gathered = [p for p in group.fsdp_params if "_unsharded_param" in vars(p) and p._unsharded_param.requires_grad]
        for parameter in gathered:
            if parameter.unsharded_accumulated_grad is not None or parameter._unsharded_param.grad is not None:
                self._used.add(parameter.sharded_param)
            elif group.reduce_grads:  # not while accumulating gradients: the next backward may use the parameter
                parameter._unsharded_param.grad = torch.zeros_like(parameter._unsharded_param)
                if parameter.sharded_param.grad is None:
                    self._filled.add(parameter.sharded_param)
        post_backward(*args)

    def settle(self, start: Callable[[Tensor], Callable[[], object]]) -> None:
        """Remove, after a backward, the zero gradients of parameters that no device used.

        With two gloo devices on a busy host this takes 4% of a step of 33 ms (6% if all waited for the sum). In a step
        of 340 ms, with 10 million parameters, its time can't be distinguished from noise. `start` begins an in-place
        sum of a CPU tensor over the devices, and returns a function that waits for it. Collective."""
        if not all(group.reduce_grads for group in self._groups):
            return  # gradients are being accumulated
        every = [parameter.sharded_param for group in self._groups for parameter in group.fsdp_params]
        flags = torch.tensor([parameter in self._used for parameter in every], dtype=torch.int32)
        wait = start(flags)
        if self._filled:  # else this device has no zeros to remove
            wait()
            for parameter, devices in zip(every, flags.tolist(), strict=True):
                if not devices and parameter in self._filled:
                    parameter.grad = None
        self._used, self._filled = set(), set()
