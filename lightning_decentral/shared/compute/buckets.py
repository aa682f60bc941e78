"""Flat buckets: parameters as views of a few contiguous tensors, how these are packed, and the pool of message buffers.

A message of many small tensors costs one latency each; a flat bucket costs one. Other code sees unchanged parameters:
the same `Parameter` objects with the same shape, stride, dtype, gradient and hooks, whose storage now lies in a bucket.
Their strides stay, too, so an index in a message or in a rule's state always means the same element."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from lightning_decentral.shared.compute import cuda
from lightning_decentral.shared.compute.layout import Place, refuse_lazy

ALIGNMENT_BYTES = 128  # vector loads and matrix kernels want aligned rows; the padding travels along (zeros)


class Bucket:
    """Flat tensor with the storage of its parameters: p lies at `flat[offset_p : offset_p + numel_p]`, in order. They
    are distinct, of one dtype and device. `flat` is padded to a multiple of `parts` aligned parts."""

    def __init__(self, parameters: Sequence[nn.Parameter], parts: int = 1) -> None:
        self.parameters = tuple(parameters)
        step = max(1, ALIGNMENT_BYTES // parameters[0].element_size())
        sizes = [-(-self.elements(p) // step) * step for p in parameters]  # rounded up to aligned places
        self._offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        self._grain = step * parts
        whole = -(-max(1, sum(sizes)) // self._grain) * self._grain
        self.places = [self.lies(p) for p in parameters]
        self.held = self.flat = self.room(whole, parameters[0])
        self.adopt()

    def room(self, elements: int, like: Tensor) -> Tensor:
        """Return zeroed memory for so many elements."""
        return torch.zeros(elements, dtype=like.dtype, device=like.device)

    def elements(self, parameter: nn.Parameter) -> int:
        """Return how many of the parameter's elements the bucket holds."""
        return parameter.numel()

    def lies(self, parameter: nn.Parameter) -> Place:
        """Return the memory layout that the parameter has in the bucket."""
        return Place.of(parameter)

    def check(self, parameter: nn.Parameter, place: Place) -> None:
        """Check the layout of a parameter to which the user's code gave other memory."""
        place.check(parameter)

    @property
    def bytes(self) -> int:
        """Bytes of one message of this bucket, padding included."""
        return self.flat.numel() * self.flat.element_size()

    @torch.no_grad()
    def adopt(self) -> None:
        """Make every parameter a view of the bucket, with its value; a parameter that is one costs two comparisons."""
        begins, each = self.held.data_ptr(), self.held.element_size()
        moved: list[tuple[nn.Parameter, Tensor, Tensor]] = []
        for parameter, offset, place in zip(self.parameters, self._offsets, self.places, strict=True):
            if parameter.data_ptr() == begins + offset * each and parameter.stride() == place.strides:
                continue
            self.check(parameter, place)
            # Parameters may be transposed in place or swapped: copied first, lest one be overwritten before it's read.
            inside = parameter.untyped_storage().data_ptr() == begins
            value = parameter.detach().clone() if inside else parameter
            moved.append((parameter, value, _view(self.held, offset, place)))
        for parameter, value, view in moved:
            view.copy_(value)
            parameter.data = view

    def ranges(self) -> list[range]:
        """Return the range of each parameter's elements, by the indices that `sampled` takes."""
        pairs = zip(self.parameters, self._offsets, strict=True)
        return [range(offset, offset + self.elements(p)) for p, offset in pairs]

    def sampled(self, places: Tensor) -> Tensor:
        """Return the present elements of the parameters at these indices."""
        return self.held[places]

    @property
    def padding(self) -> Tensor:
        """Elements between the parameters, [gaps]: zeros, unless a codec without a zero has rounded them."""
        return torch.cat([*self._gaps(), self.held[:0]])

    @padding.setter
    def padding(self, values: Tensor) -> None:
        gaps = self._gaps()
        for gap, value in zip(gaps, values.split([len(gap) for gap in gaps]), strict=True):
            gap.copy_(value)

    def _gaps(self) -> list[Tensor]:
        ranges = self.ranges()
        ends = [*(following.start for following in ranges[1:]), len(self.held)]
        return [self.held[own.stop : end] for own, end in zip(ranges, ends, strict=True)]

    def views(self, flat: Tensor) -> list[tuple[int, Tensor]]:
        """Return (address of a parameter, view of another flat tensor at its offset, in its shape) for each one."""
        rows = zip(self.parameters, self._offsets, self.places, strict=True)
        return [(p.data_ptr(), _view(flat, offset, place)) for p, offset, place in rows]

    def border(self, least: int, most: int) -> int | None:
        """Return the last aligned offset with `least` to `most` elements behind it, if possible where a parameter
        begins; None where there is none. The fewer elements lie behind it, the better."""
        first, last = max(1, self.flat.numel() - most), self.flat.numel() - least
        aligned = range(last // self._grain * self._grain, first - 1, -self._grain)
        begins = [offset for offset in self._offsets if offset in aligned]
        return max(begins or aligned, default=None)

    def store(self) -> None:
        """Copy mixed values to the parameters: does nothing here, where parameters are views of `flat`."""

    @torch.no_grad()
    def release(self) -> None:
        """Give every parameter storage of its own again, so that after training no parameter keeps a bucket's memory
        alive."""
        for parameter in self.parameters:
            parameter.data = parameter.data.clone(memory_format=torch.preserve_format)


class HostBucket(Bucket):
    """Bucket with a host copy: `flat` is a copy on the host of the device's `held`, whose views the parameters are.
    `adopt` copies to the host, `store` to the device."""

    def __init__(self, parameters: Sequence[nn.Parameter], parts: int = 1) -> None:
        super().__init__(parameters, parts)
        self.flat = cuda.host_like(self.held).copy_(self.held)

    @torch.no_grad()
    def adopt(self) -> None:
        """Copy the device's values to the host, which waits for the update and for the copy."""
        super().adopt()
        if self.flat is not self.held:  # not yet while the bucket is made
            self.flat.copy_(self.held)

    @torch.no_grad()
    def store(self) -> None:
        # The device reads `flat` until the next `adopt`, which is queued behind this copy and awaited.
        self.held.copy_(self.flat, non_blocking=True)


class BucketSpan:
    """Part flat[start:stop] of a bucket, which is mixed as a bucket of its own."""

    def __init__(self, bucket: Bucket, start: int, stop: int) -> None:
        self._bucket, self._start = bucket, start
        self.flat = bucket.flat[start:stop]

    def adopt(self) -> None:
        if not self._start:  # done once for all spans of the bucket
            self._bucket.adopt()


@dataclass
class LooseBucket:
    """Flat tensor of its own, not of parameters: in a simulation all workers' parameters, one row for each worker."""

    flat: Tensor

    def adopt(self) -> None:
        return


class Pool:
    """Pool of message buffers that are reused, so that a round allocates nothing."""

    def __init__(self) -> None:
        # Fresh memory costs more than the copy into it: on a host every page is faulted in anew.
        self._free: dict[tuple[torch.Size, torch.dtype, torch.device], list[Tensor]] = {}

    def take(self, like: Tensor) -> Tensor:
        """Return a buffer of the same shape, type and device, with any content."""
        return self.take_new(like.shape, like.dtype, like.device)

    def take_new(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        try:
            return self._free[shape, dtype, device].pop()
        except (KeyError, IndexError):  # no test first: two threads may take from one pool
            return torch.empty(shape, dtype=dtype, device=device)

    def give(self, buffers: Iterable[Tensor]) -> None:
        """Return buffers that were taken to the pool, each once."""
        for buffer in buffers:
            self._free.setdefault((buffer.shape, buffer.dtype, buffer.device), []).append(buffer)


def _view(flat: Tensor, offset: int, place: Place) -> Tensor:
    """A view of `flat` with the shape and strides of a parameter (channels_last stays channels_last)."""
    rows = flat[offset : offset + place.shape.numel()]
    return rows.as_strided(place.shape, place.strides, rows.storage_offset())


MOST_BUCKET_BYTES = 256 * 2**20
LEAST_BUCKET_BYTES = 2 * 2**20
DEVICE_BUCKET_BYTES = 2**30  # a device waits for all buckets of a round: few are better than many
BUCKETS = 8
SHORT = 16  # the last bucket may overlap with the next round if it is at most this fraction (1/SHORT) of the bytes
TAIL = 2 * SHORT  # the tail that a long last bucket is split into: from 1/TAIL to 1/SHORT of the bytes
LEAST_CUT_BYTES = 2**20  # smaller models: another message would take as long as the split saves


def with_tail(buckets: Sequence[Bucket]) -> list[Bucket | BucketSpan]:
    """Split a long last bucket in two, where an offset fits, so that the last bucket is short."""
    # The next round's messages may begin while the last bucket's are under way; were it longer, two neighbours' would
    # fill the queues on the way to a worker, and packets be dropped. The bucket is also split where nothing overlaps,
    # for one small message more, so a checkpoint fits both. A device sends all buckets at once.
    whole = sum(bucket.bytes for bucket in buckets)
    if whole < max(1, LEAST_CUT_BYTES) or is_short(buckets[-1].bytes, whole) or buckets[-1].flat.device.type == "cuda":
        return [*buckets]
    *others, last = buckets
    each = last.flat.element_size()
    place = last.border(-(-whole // TAIL // each), whole // SHORT // each)
    cut = [last] if place is None else [BucketSpan(last, 0, place), BucketSpan(last, place, last.flat.numel())]
    return [*others, *cut]


def dealt(parameters: Sequence[nn.Parameter], hands: int) -> list[list[nn.Parameter]]:
    """Distribute parameters in order over so many lists, each to the list with the fewest bytes so far."""
    found: list[list[nn.Parameter]] = [[] for _ in range(hands)]
    held = [0] * hands
    for parameter in parameters:
        least = held.index(min(held))
        found[least].append(parameter)
        held[least] += parameter.numel() * parameter.element_size()
    return found


def is_short(last_bytes: int, whole_bytes: int) -> bool:
    """Return whether a last bucket is short enough to overlap with the next round."""
    return SHORT * last_bytes <= whole_bytes


def bucket_bytes_of(parameters: Iterable[nn.Parameter]) -> int:
    """Return the bytes of a bucket: an eighth of the parameters' bytes, from 2 MiB to 256 MiB."""
    # The links idle while a single bucket is mixed: a few are better than one. Each costs a message's latency: few
    # are better than many.
    known = (p for p in dict.fromkeys(parameters) if not isinstance(p, UninitializedParameter))
    whole = sum(p.numel() * p.element_size() for p in known)
    return min(max(-(-whole // BUCKETS), LEAST_BUCKET_BYTES), MOST_BUCKET_BYTES)


def message_bytes_of(parameters: Sequence[nn.Parameter]) -> int:
    """Return the bytes of a bucket where all parameters are sent: `bucket_bytes_of` on a host, 1 GiB on a device."""
    return DEVICE_BUCKET_BYTES if any(p.device.type == "cuda" for p in parameters) else bucket_bytes_of(parameters)


def pack(
    parameters: Iterable[nn.Parameter],
    bucket_bytes: int | None = None,
    make: Callable[[Sequence[nn.Parameter]], Bucket] = Bucket,
) -> list[Bucket]:
    """Pack the parameters into buckets, in order, of one dtype and device each, made by `make`. No bucket has more than
    `bucket_bytes` (by default `message_bytes_of` them) unless one parameter has. Tied parameters count once; empty ones
    and integers are left out. ValueError: `bucket_bytes` is not positive, or a lazy module has not seen its first
    batch."""
    parameters = list(parameters)
    if bucket_bytes is None:
        bucket_bytes = message_bytes_of(parameters)
    check_bucket_bytes(bucket_bytes)
    refuse_lazy(parameters)
    mixed = [p for p in parameters if p.numel() and (p.is_floating_point() or p.is_complex())]
    return [make(members) for members in chunked(mixed, bucket_bytes)]


def check_bucket_bytes(bucket_bytes: int | None) -> None:
    """Raise ValueError for buckets of no bytes; None means the default size."""
    if bucket_bytes is not None and bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}: leave it out for the default")


def chunked(parameters: Iterable[nn.Parameter], most_bytes: int) -> list[list[nn.Parameter]]:
    """Split distinct parameters into chunks of one dtype and device, in order, of at most `most_bytes` if possible."""
    chunks: dict[tuple[torch.dtype, torch.device], list[list[nn.Parameter]]] = {}
    room: dict[tuple[torch.dtype, torch.device], int] = {}
    for parameter in dict.fromkeys(parameters):
        kind, size = (parameter.dtype, parameter.device), parameter.numel() * parameter.element_size()
        if room.get(kind, -1) < size:
            chunks.setdefault(kind, []).append([])
            room[kind] = most_bytes
        chunks[kind][-1].append(parameter)
        room[kind] -= size
    return [members for rows in chunks.values() for members in rows]
