"""Whole tensors on the host of a member's first device, put together of its devices' parts and cut into them again.

    gather    whole <- [rows of device 0, ..., rows of device L - 1]
    scatter   rows of device p <- whole, for every p

Every byte of a shard travels once, inside the island, and the first device has room for one other's at a time. A
pipeline's stage has some parameters whole: they travel as they are (`OwnBucket`, `StageBucket`).
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
    """Whole tensors, of which each device of an island holds some rows; all call the same in the same order."""

    def __init__(self, over: Transport, device: torch.device) -> None:
        self._over, self._device = over, device
        self.first = over.rank == 0  # its host has the wholes

    def room(self, elements: int, dtype: torch.dtype) -> Tensor:
        """[elements], zeros on the first device's host; elsewhere of no memory."""
        if not self.first:
            return torch.empty(elements, dtype=dtype, device="meta")
        return cuda.host_like(torch.empty(elements, dtype=dtype, device="meta"), self._device).zero_()

    def gather(self, shards: Sequence[Tensor], wholes: Sequence[Tensor]) -> None:
        """The first device's wholes <- everybody's shards of them. Of one type."""
        if not self.first:
            send(self._over, 0, _flat(shards).to(self._device))  # (bytes,); NCCL sends from devices alone
            return
        for place in range(self._over.size):
            rows = [rows_of(whole, place, self._over.size) for whole in wholes]  # views: (that device's rows, ...)
            if place:
                self._receive(place, rows)
            else:
                _copy(_flat(shards).cpu(), rows)  # its own shard stays in this process

    def scatter(self, wholes: Sequence[Tensor], shards: Sequence[Tensor]) -> None:
        """Everybody's shards <- their rows of the first device's wholes. Of one type."""
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
        """Whole of a tensor that may be sharded, on the first device's host; elsewhere of no memory."""
        if not is_sharded(tensor):
            return tensor.detach().cpu()
        whole = self.room(tensor.numel(), tensor.dtype).view(tensor.shape)  # the global shape
        self.gather([local(tensor)], [whole])  # (own rows, ...) -> (all rows, ...)
        return whole

    def cut(self, whole: Tensor, tensor: Tensor) -> Tensor:
        """Make a value for `tensor`: this device's shard of the first one's whole, or without shards the whole."""
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
    """Their bytes, one behind the other."""
    return torch.cat([tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])


@torch.no_grad()
def _copy(flat: Tensor, into: Sequence[Tensor]) -> None:
    parts = flat.split([tensor.numel() * tensor.element_size() for tensor in into])
    for tensor, part in zip(into, parts, strict=True):
        tensor.copy_(part.view(tensor.dtype).view(tensor.shape))


def send(over: Transport, to: int, flat: Tensor) -> None:  # (elements,)
    """Send a tensor, and wait until it has left."""
    if flat.numel():  # more devices than rows: some have none
        outgoing, _ = over.exchange([Message(to, flat, 0)], [])
        outgoing[0].wait()


def receive(over: Transport, source: int, flat: Tensor) -> None:  # (elements,)
    """Wait for a tensor, to be written into this one."""
    if flat.numel():
        _, incoming = over.exchange([], [Message(source, flat, 0)])
        incoming[0].wait()


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
        self._wholes.gather([local(p) for p in self.parameters], self.wholes())  # shards -> flat

    def store(self) -> None:
        self._wholes.scatter(self.wholes(), [local(p) for p in self.parameters])  # flat -> shards

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
        pairs = zip(self.parameters, self._offsets, strict=True)
        return [self.flat[offset : offset + p.numel()].view(p.shape) for p, offset in pairs]


class OwnBucket(Bucket):
    """Bucket of a later stage than the first, on its device: `adopt` sends it to the first's host, `store` gets it."""

    def __init__(self, parameters: Sequence[nn.Parameter], over: Transport) -> None:
        self._over = over
        self._made = False  # the base's constructor adopts
        super().__init__(parameters)
        self._made = True

    def adopt(self) -> None:
        super().adopt()
        if self._made:  # not yet while the first one hasn't made its own
            send(self._over, 0, self.flat.cpu())

    def store(self) -> None:
        host = self.flat if self.flat.device.type == "cpu" else cuda.host_like(self.flat)  # as many elements, pinned
        receive(self._over, 0, host)
        if host is not self.flat:
            self.flat.copy_(host)


class StageBucket(Bucket):
    """The same on the first stage's host, in the order of the other's messages."""

    def __init__(self, over: Transport, stage: int, elements: int, dtype: torch.dtype) -> None:
        self.parameters, self._offsets, self.places, self._grain = (), [], [], elements
        self._over, self._stage = over, stage
        self.held = self.flat = torch.zeros(elements, dtype=dtype)  # (elements,), on the host

    def adopt(self) -> None:
        receive(self._over, self._stage, self.flat)

    def store(self) -> None:
        send(self._over, self._stage, self.flat)

    def release(self) -> None:
        """Do nothing: there are no parameters here."""
