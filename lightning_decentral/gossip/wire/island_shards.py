"""A device that holds a shard of its island's parameters: what FSDP gathers and reduces, and what all hold alike."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_decentral.gossip.wire.island_member import InPlace, Mean, Meet, Several, inside
from lightning_decentral.shared.compute.buckets import Bucket, pack
from lightning_decentral.shared.compute.layout import is_row_major
from lightning_decentral.shared.compute.modules import same
from lightning_decentral.shared.wire.fsdp import ShardBucket, Sharded, is_sharded, like, local
from lightning_decentral.shared.wire.mean import mean
from lightning_decentral.shared.wire.pending import Pending
from lightning_decentral.shared.wire.transport import Wire


class Sharding(Several):
    """One of several devices with a shard of the parameters each."""

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
        self._trains: list[tuple[str, nn.Parameter]] = []

    def pack(self, parameters: Sequence[nn.Parameter], bucket_bytes: int | None) -> list[Bucket]:
        return pack(parameters, bucket_bytes and bucket_bytes * self.devices, ShardBucket)

    def alike(self, parameters: Sequence[nn.Parameter], take: Callable[[Sequence[nn.Parameter]], None]) -> None:
        if not all(map(is_sharded, parameters)):
            raise RuntimeError(
                "a parameter that came while training isn't in shards, which FullyShard lays out before the optimizers "
                "exist: make all modules in configure_model, or use AllReduce"
            )

    def arrange(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            if not is_row_major(parameter.shape, parameter.stride()):
                raise ValueError(
                    f"FullyShard cuts rows of contiguous parameters, {name} has strides {parameter.stride()}: give "
                    "the model torch.contiguous_format, or use AllReduce"
                )
        self._sharded = Sharded(module, self._inside, self._device, self._compute)
        from lightning_decentral.gossip.compute.unused import Used  # no other run reads it

        self._used = Used(self._sharded.groups)

    def train(self, module: nn.Module, step: Callable[[], Any], redirect: Callable[[], Any]) -> Any:
        self.rest()
        self._look(module)
        try:
            # In the module's own call, where FSDP gathers parameters; that waits for the other devices.
            return self._meet(redirect)
        except RuntimeError as error:
            new = self._sharded.changed() if self._sharded is not None else ""
            if not new:
                raise
            raise RuntimeError(
                f"the parameter {new} has come while training, and FullyShard lays shards out before: prune, "
                "reparametrize and add modules before fit, or use AllReduce"
            ) from error

    def _look(self, module: nn.Module) -> None:
        """FSDP reduces the gradients of what is trained, and so much of them on every device."""
        self.layouts.done()
        before, self._trains = self._trains, [named for named in module.named_parameters() if named[1].requires_grad]
        if before and not _same(before, self._trains):
            self.layouts.changed()
        self.layouts.begin()

    def evaluate(self, step: Callable[[], Any], redirect: Callable[[], Any]) -> Any:
        # No backward follows, which would give up what the forward gathered.
        output = redirect()
        self.rest()
        return output

    def after(self) -> None:
        if self._used is not None:
            self._meet(partial(self._used.settle, self._counted))

    def _counted(self, flags: Tensor) -> Callable[[], object]:
        # Those that nobody waits for are kept: backends write into them.
        self._counts = [*self._counts[-31:], pending := self._hosts.all_reduce(flags)]
        return pending.wait

    @contextmanager
    def blocked(self) -> Iterator[None]:
        assert self._sharded is not None
        # Whole gradients are kept meanwhile.
        self._sharded.root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._sharded.root.set_requires_gradient_sync(True)

    def change(self, tensors: Sequence[Tensor], change: InPlace) -> None:
        from lightning_decentral.shared.wire.owners import each_once  # no other run reads it

        shapes = [tuple(tensor.shape) for tensor in tensors]
        self._meet(lambda: each_once(change, [local(tensor) for tensor in tensors], shapes, self._inside))

    def close(self, alone: bool) -> None:
        super().close(alone)
        if self._sharded is not None:
            # Whole parameters come from all devices of the island.
            (self._sharded.abandon if alone else self._sharded.undo)()
        self._sharded = self._used = None

    def explain(self, error: BaseException) -> None:
        if "mixed torch.Tensor and DTensor" in str(error):
            warnings.warn(
                "under FullyShard a parameter and its gradient are shards (DTensors): bring a mask by "
                "torch.distributed.tensor.distribute_tensor(mask, p.device_mesh, p.placements), or use AllReduce",
                stacklevel=2,
            )

    def rest(self) -> None:
        if self._sharded is not None:
            self._sharded.reshard()

    def mean(self, tensors: Sequence[Tensor], of_all: Mean) -> list[Tensor]:
        # Shards over the devices that hold the same, all else over all devices.
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


def _same(before: Sequence[tuple[str, nn.Parameter]], now: Sequence[tuple[str, nn.Parameter]]) -> bool:
    return [name for name, _ in before] == [name for name, _ in now] and same(
        [parameter for _, parameter in before], [parameter for _, parameter in now]
    )
