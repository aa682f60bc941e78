"""Whole tensors on the host of an island's first device, put together of its devices' shards and cut into them again.

    gather    whole <- [rows of device 0, ..., rows of device L - 1]
    scatter   rows of device p <- whole, for every p

Every byte of a shard travels once, inside the island, and the first device has room for one other's at a time.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from lightning_decentral.shared.compute import cuda
from lightning_decentral.shared.compute.buckets import Bucket
from lightning_decentral.shared.compute.layout import Place
from lightning_decentral.shared.wire.fsdp import is_sharded, like, local, rows_of
from lightning_decentral.shared.wire.transport import Message, Transport


class Wholes:
    """Whole tensors, of which each device holds some rows; all devices call the same in the same order.

    Args:
        over: the devices of the island.
        device: this one's.
    """

    def __init__(self, over: Transport, device: torch.device) -> None:
        self._over, self._device = over, device
        self.first = over.rank == 0

    def room(self, elements: int, dtype: torch.dtype) -> Tensor:
        """[elements], zeros on the first device's host; elsewhere of no memory."""
        if not self.first:
            return torch.empty(elements, dtype=dtype, device="meta")
        return cuda.host_like(torch.empty(elements, dtype=dtype, device="meta"), self._device).zero_()

    def gather(self, shards: Sequence[Tensor], wholes: Sequence[Tensor]) -> None:
        """The first device's wholes <- everybody's shards of them. Of one type."""
        if not self.first:
            self._send(0, shards)
            return
        for place in range(self._over.size):
            rows = [rows_of(whole, place, self._over.size) for whole in wholes]
            if place:
                self._receive(place, rows)
            else:
                _copy(_flat(shards).cpu(), rows)

    def scatter(self, wholes: Sequence[Tensor], shards: Sequence[Tensor]) -> None:
        """Everybody's shards <- their rows of the first device's wholes. Of one type."""
        if not self.first:
            self._receive(0, shards)
            return
        for place in range(self._over.size):
            rows = [rows_of(whole, place, self._over.size) for whole in wholes]
            if place:
                self._send(place, rows)
            else:
                _copy(_flat(rows).to(self._device), shards)

    def whole(self, tensor: Tensor) -> Tensor:
        """Whole of a tensor that may be sharded, on the first device's host; elsewhere of no memory."""
        if not is_sharded(tensor):
            return tensor.detach().cpu()
        whole = self.room(tensor.numel(), tensor.dtype).view(tensor.shape)
        self.gather([local(tensor)], [whole])
        return whole

    def cut(self, whole: Tensor, tensor: Tensor) -> Tensor:
        """Make a value for `tensor`: this device's shard of the first one's whole, or without shards the whole."""
        found = torch.empty_like(local(tensor.detach()))
        if is_sharded(tensor):
            self.scatter([whole], [found])
            return like(tensor, found)
        if self.first:
            found.copy_(whole)
        self._over.broadcast(found).wait()
        return found

    def _send(self, to: int, tensors: Sequence[Tensor]) -> None:
        flat = _flat(tensors).to(self._device)
        if flat.numel():
            outgoing, _ = self._over.exchange([Message(to, flat, 0)], [])
            outgoing[0].wait()

    def _receive(self, source: int, into: Sequence[Tensor]) -> None:
        flat = torch.empty(sum(t.numel() * t.element_size() for t in into), dtype=torch.uint8, device=self._device)
        if flat.numel():
            _, incoming = self._over.exchange([], [Message(source, flat, 0)])
            incoming[0].wait()
        _copy(flat.to(into[0].device), into)


@torch.no_grad()
def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """Their bytes, one behind the other."""
    return torch.cat([tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])


@torch.no_grad()
def _copy(flat: Tensor, into: Sequence[Tensor]) -> None:
    parts = flat.split([tensor.numel() * tensor.element_size() for tensor in into])
    for tensor, part in zip(into, parts, strict=True):
        tensor.copy_(part.view(tensor.dtype).view(tensor.shape))


class WholeBucket(Bucket):
    """`flat` has whole parameters, on the first device's host alone: `adopt` gathers its devices' shards, `store`
    scatters them. Both are collective."""

    def __init__(self, parameters: Sequence[nn.Parameter], wholes: Wholes) -> None:
        self._wholes = wholes
        super().__init__(parameters)

    def room(self, elements: int, like: Tensor) -> Tensor:
        return self._wholes.room(elements, like.dtype)

    def lies(self, parameter: nn.Parameter) -> Place:
        return Place.row_major(parameter)

    def adopt(self) -> None:
        self._wholes.gather([local(p) for p in self.parameters], self.wholes())

    def store(self) -> None:
        self._wholes.scatter(self.wholes(), [local(p) for p in self.parameters])

    def release(self) -> None:
        """The shards are FSDP's."""

    def ranges(self) -> list[range]:
        """Ranges of this device's shards, one behind the other."""
        ends = [*accumulate((local(p).numel() for p in self.parameters), initial=0)]
        return [range(first, last) for first, last in pairwise(ends)]

    def sampled(self, places: Tensor) -> Tensor:
        return torch.cat([local(p).detach().reshape(-1) for p in self.parameters])[places]

    def wholes(self) -> list[Tensor]:
        """Views of `flat` for each parameter, in its shape."""
        return [self.flat[offset : offset + p.numel()].view(p.shape) for p, offset in self._pairs()]

    def _pairs(self) -> list[tuple[nn.Parameter, int]]:
        return [*zip(self.parameters, self._offsets, strict=True)]
