"""Whole tensors on the host of a member's first device: gathered from its devices' shards and scattered back.

    gather    whole <- [rows of device 0, ..., rows of device L - 1]
    scatter   rows of device p <- whole, for every p

Every byte of a shard is sent once, inside the island, and the first device buffers one other device's shards at a time.
A pipeline's stage keeps whole parameters, which are sent unchanged (`OwnBucket`, `StageBucket`)."""

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
    """Gathers and scatters tensors of which each device of an island has some rows. All methods are collective."""

    def __init__(self, over: Transport, device: torch.device) -> None:
        self._over, self._device = over, device
        self.first = over.rank == 0  # its host has the whole tensors

    def room(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Allocate [elements] zeros on the first device's host; on other devices a meta tensor without memory."""
        if not self.first:
            return torch.empty(elements, dtype=dtype, device="meta")
        return cuda.host_like(torch.empty(elements, dtype=dtype, device="meta"), self._device).zero_()

    def gather(self, shards: Sequence[Tensor], wholes: Sequence[Tensor]) -> None:
        """Gather all devices' shards into the first device's whole tensors. All have one type."""
        if not self.first:
            send(self._over, 0, _flat(shards).to(self._device))  # (bytes,); NCCL sends only from devices
            return
        for place in range(self._over.size):
            rows = [rows_of(whole, place, self._over.size) for whole in wholes]  # views: (that device's rows, ...)
            if place:
                self._receive(place, rows)
            else:
                _copy(_flat(shards).cpu(), rows)  # its own shard stays in this process

    def scatter(self, wholes: Sequence[Tensor], shards: Sequence[Tensor]) -> None:
        """Scatter the rows of the first device's whole tensors to all devices' shards. All have one type."""
        if not self.first:
            self._receive(0, shards)  # (own rows, ...) each
            return
        for place in range(self._over.size):
            rows = [rows_of(whole, place, self._over.size) for whole in wholes]  # views: (that device's rows, ...)
            if place:
                send(self._over, place, _flat(rows).to(self._device))
            else:
                _copy(_flat(rows).to(self._device), shards)  # one copy to the device, however many tensors

    def whole(self, tensor: Tensor) -> Tensor:
        """Return the whole of a tensor that may be sharded, on the first device's host; elsewhere a meta tensor."""
        if not is_sharded(tensor):
            return tensor.detach().cpu()
        whole = self.room(tensor.numel(), tensor.dtype).view(tensor.shape)  # the global shape
        self.gather([local(tensor)], [whole])  # (own rows, ...) -> (all rows, ...)
        return whole

    def cut(self, whole: Tensor, tensor: Tensor) -> Tensor:
        """Return this device's shard of the first device's whole tensor; the whole, if `tensor` isn't sharded."""
        found = torch.empty_like(local(tensor.detach()))  # (own rows, ...)
        if is_sharded(tensor):
            self.scatter([whole], [found])  # (all rows, ...) -> (own rows, ...)
            return like(tensor, found)
        if self.first:
            found.copy_(whole)
        self._over.broadcast(found).wait()
        return found

    def _receive(self, source: int, into: Sequence[Tensor]) -> None:
        flat = torch.empty(sum(t.numel() * t.element_size() for t in into), dtype=torch.uint8, device=self._device)
        receive(self._over, source, flat)
        _copy(flat.to(into[0].device), into)  # (bytes,) -> the tensors


@torch.no_grad()
def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate the tensors' bytes."""
    return torch.cat([tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])


@torch.no_grad()
def _copy(flat: Tensor, into: Sequence[Tensor]) -> None:
    parts = flat.split([tensor.numel() * tensor.element_size() for tensor in into])
    for tensor, part in zip(into, parts, strict=True):
        tensor.copy_(part.view(tensor.dtype).view(tensor.shape))


def send(over: Transport, to: int, flat: Tensor) -> None:  # (elements,)
    """Send a tensor and wait until it has left."""
    if flat.numel():  # more devices than rows: some have none
        outgoing, _ = over.exchange([Message(to, flat, 0)], [])
        outgoing[0].wait()


def receive(over: Transport, source: int, flat: Tensor) -> None:  # (elements,)
    """Receive a tensor into this one and wait for it."""
    if flat.numel():
        _, incoming = over.exchange([], [Message(source, flat, 0)])
        incoming[0].wait()


class WholeBucket(Bucket):
    """Bucket of whole parameters (`flat`), on the first device's host: `adopt` gathers the devices' shards, `store`
    scatters them. Both are collective."""

    def __init__(self, parameters: Sequence[nn.Parameter], wholes: Wholes) -> None:
        self._wholes = wholes
        super().__init__(parameters)

    def room(self, elements: int, like: Tensor) -> Tensor:
        return self._wholes.room(elements, like.dtype)

    def lies(self, parameter: nn.Parameter) -> Place:
        return Place.row_major(parameter)

    def adopt(self) -> None:
        self._wholes.gather([local(p) for p in self.parameters], self.wholes())  # shards -> flat

    def store(self) -> None:
        self._wholes.scatter(self.wholes(), [local(p) for p in self.parameters])  # flat -> shards

    def release(self) -> None:
        """Do nothing, as the shards belong to FSDP."""

    def ranges(self) -> list[range]:
        """Return the ranges of this device's shards in their concatenation."""
        ends = [*accumulate((local(p).numel() for p in self.parameters), initial=0)]
        return [range(first, last) for first, last in pairwise(ends)]

    def sampled(self, places: Tensor) -> Tensor:
        return torch.cat([local(p).detach().reshape(-1) for p in self.parameters])[places]

    def wholes(self) -> list[Tensor]:
        """Return a view of `flat` for each parameter, in its shape."""
        pairs = zip(self.parameters, self._offsets, strict=True)
        return [self.flat[offset : offset + p.numel()].view(p.shape) for p, offset in pairs]


class OwnBucket(Bucket):
    """Bucket of a later stage, on its device: `adopt` sends it to the first stage's host, `store` receives it back."""

    def __init__(self, parameters: Sequence[nn.Parameter], over: Transport) -> None:
        self._over = over
        self._made = False  # the base's constructor adopts
        super().__init__(parameters)
        self._made = True

    def adopt(self) -> None:
        super().adopt()
        if self._made:  # not before the first stage has made its `StageBucket`
            send(self._over, 0, self.flat.cpu())

    def store(self) -> None:
        host = self.flat if self.flat.device.type == "cpu" else cuda.host_like(self.flat)  # as many elements, pinned
        receive(self._over, 0, host)
        if host is not self.flat:
            self.flat.copy_(host)


class StageBucket(Bucket):
    """Copy of a later stage's bucket on the first stage's host, received and sent in that stage's order."""

    def __init__(self, over: Transport, stage: int, elements: int, dtype: torch.dtype) -> None:
        self.parameters, self._offsets, self.places, self._grain = (), [], [], elements
        self._over, self._stage = over, stage
        self.held = self.flat = torch.zeros(elements, dtype=dtype)  # (elements,), on the host

    def adopt(self) -> None:
        receive(self._over, self._stage, self.flat)

    def store(self) -> None:
        send(self._over, self._stage, self.flat)

    def release(self) -> None:
        """Do nothing, as the bucket has no parameters."""
