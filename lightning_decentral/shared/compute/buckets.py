"""Flat buckets: parameters as views of a few contiguous tensors, how these are packed, and the pool of message buffers.

A message of many small tensors costs one latency each; a flat bucket costs one. The parameters stay what they are to
everyone else: the same `Parameter` objects with the same shape, stride, dtype, gradient and hooks, whose storage now
lies in a bucket. Their strides stay as they were then: a place in a message or a rule's state is one number's for good.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from lightning_decentral.shared.compute import cuda
from lightning_decentral.shared.compute.layout import Place, refuse_lazy

ALIGNMENT_BYTES = 128  # vector loads and matrix kernels want aligned rows; the padding travels along (zeros)


class Bucket:
    """`flat[offset_p : offset_p + numel_p]` is the storage of parameter p, for p in order: of one dtype and device,
    each once. `flat` is padded to a multiple of so many aligned `parts`."""

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
        """Memory for so many."""
        return torch.zeros(elements, dtype=like.dtype, device=like.device)

    def elements(self, parameter: nn.Parameter) -> int:
        """Number of the parameter's elements that the bucket holds."""
        return parameter.numel()

    def lies(self, parameter: nn.Parameter) -> Place:
        """Memory layout of the parameter in the bucket."""
        return Place.of(parameter)

    def check(self, parameter: nn.Parameter, place: Place) -> None:
        """Check a parameter that the user's code gave another memory."""
        place.check(parameter)

    @property
    def bytes(self) -> int:
        """Bytes of one message of this bucket, padding included."""
        return self.flat.numel() * self.flat.element_size()

    @torch.no_grad()
    def adopt(self) -> None:
        """Make every parameter a view of the bucket, keeping its value; one that is costs two comparisons."""
        begins, each = self.held.data_ptr(), self.held.element_size()
        moved: list[tuple[nn.Parameter, Tensor, Tensor]] = []
        for parameter, offset, place in zip(self.parameters, self._offsets, self.places, strict=True):
            if parameter.data_ptr() == begins + offset * each and parameter.stride() == place.strides:
                continue
            self.check(parameter, place)
            # Transposed in place, or exchanged with another of the bucket: what is read mustn't be written before.
            inside = parameter.untyped_storage().data_ptr() == begins
            value = parameter.detach().clone() if inside else parameter
            moved.append((parameter, value, _view(self.held, offset, place)))
        for parameter, value, view in moved:
            view.copy_(value)
            parameter.data = view

    def ranges(self) -> list[range]:
        """Ranges of each parameter's elements, as `sampled` counts them."""
        pairs = zip(self.parameters, self._offsets, strict=True)
        return [range(offset, offset + self.elements(p)) for p, offset in pairs]

    def sampled(self, places: Tensor) -> Tensor:
        """Elements of the parameters at these places, as they are now."""
        return self.held[places]

    @property
    def padding(self) -> Tensor:
        """The gaps between the parameters: zeros, but where a codec without a zero has rounded them; [gaps]."""
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
        """(address of a parameter, what stands at its place in another flat tensor), in its shape."""
        rows = zip(self.parameters, self._offsets, self.places, strict=True)
        return [(p.data_ptr(), _view(flat, offset, place)) for p, offset, place in rows]

    def border(self, least: int, most: int) -> int | None:
        """An aligned place with `least` to `most` elements behind it, where a parameter begins if one does. The last
        such: the shorter what is behind it, the better."""
        first, last = max(1, self.flat.numel() - most), self.flat.numel() - least
        aligned = range(last // self._grain * self._grain, first - 1, -self._grain)
        begins = [offset for offset in self._offsets if offset in aligned]
        return max(begins or aligned, default=None)

    def store(self) -> None:
        """Put what was mixed into the parameters: here they are views of it already."""

    @torch.no_grad()
    def release(self) -> None:
        """Give every parameter a storage of its own again, so that nothing outlives training in someone else's
        memory."""
        for parameter in self.parameters:
            parameter.data = parameter.data.clone(memory_format=torch.preserve_format)


class HostBucket(Bucket):
    """`flat` is a copy on the host of the device's `held`, whose views the parameters are: `adopt` reads, `store`
    writes."""

    def __init__(self, parameters: Sequence[nn.Parameter], parts: int = 1) -> None:
        super().__init__(parameters, parts)
        self.flat = cuda.host_like(self.held).copy_(self.held)

    @torch.no_grad()
    def adopt(self) -> None:
        """The host waits for the update, and for the copy."""
        super().adopt()
        if self.flat is not self.held:  # not yet while the bucket is made
            self.flat.copy_(self.held)

    @torch.no_grad()
    def store(self) -> None:
        # Read until the next `adopt`, which is queued behind it and awaited.
        self.held.copy_(self.flat, non_blocking=True)


class BucketSpan:
    """flat[start:stop] of a bucket, mixed for itself."""

    def __init__(self, bucket: Bucket, start: int, stop: int) -> None:
        self._bucket, self._start = bucket, start
        self.flat = bucket.flat[start:stop]

    def adopt(self) -> None:
        if not self._start:  # once for all spans of the bucket
            self._bucket.adopt()


@dataclass
class LooseBucket:
    """Flat tensor that nobody else holds: of a simulation all workers' parameters, a row each."""

    flat: Tensor

    def adopt(self) -> None:
        return


class Pool:
    """Message buffers that are used again, so that a round allocates nothing."""

    def __init__(self) -> None:
        # Fresh memory costs more than the copy into it: on a host every page is faulted in anew.
        self._free: dict[tuple[torch.Size, torch.dtype, torch.device], list[Tensor]] = {}

    def take(self, like: Tensor) -> Tensor:
        """A buffer of the same shape, type and device, with any content."""
        return self.take_new(like.shape, like.dtype, like.device)

    def take_new(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        try:
            return self._free[shape, dtype, device].pop()
        except (KeyError, IndexError):  # not a look first: two threads may take from one pool
            return torch.empty(shape, dtype=dtype, device=device)

    def give(self, buffers: Iterable[Tensor]) -> None:
        """Hand back what was taken; each once."""
        for buffer in buffers:
            self._free.setdefault((buffer.shape, buffer.dtype, buffer.device), []).append(buffer)


def _view(flat: Tensor, offset: int, place: Place) -> Tensor:
    """A view of `flat` with the shape and strides of a parameter (channels_last stays channels_last)."""
    rows = flat[offset : offset + place.shape.numel()]
    return rows.as_strided(place.shape, place.strides, rows.storage_offset())


MOST_BUCKET_BYTES = 256 * 2**20
LEAST_BUCKET_BYTES = 2 * 2**20
DEVICE_BUCKET_BYTES = 2**30  # a device lands none of a round before all have come: few are better than many
BUCKETS = 8
SHORT = 16  # a last bucket of at most one part in so many may overlap with the next round
TAIL = 2 * SHORT  # A long last bucket ends in a tail of one part in so many or, as parameters end, up to one in `SHORT`
LEAST_CUT_BYTES = 2**20  # smaller models aren't cut: another message would take as long as it saves


def with_tail(buckets: Sequence[Bucket]) -> list[Bucket | BucketSpan]:
    """Split the last bucket in two where it's long and has a place for that, so that the last one is short."""
    # The next round's messages may begin while the last bucket's are under way; were it longer, two neighbours' would
    # fill the queues on the way to a worker, and packets be dropped. Cut is also where nothing overlaps without a
    # delay, for one small message more: so a checkpoint fits both. A device sends all buckets at once.
    whole = sum(bucket.bytes for bucket in buckets)
    if whole < max(1, LEAST_CUT_BYTES) or is_short(buckets[-1].bytes, whole) or buckets[-1].flat.device.type == "cuda":
        return [*buckets]
    *others, last = buckets
    each = last.flat.element_size()
    place = last.border(-(-whole // TAIL // each), whole // SHORT // each)
    cut = [last] if place is None else [BucketSpan(last, 0, place), BucketSpan(last, place, last.flat.numel())]
    return [*others, *cut]


def dealt(parameters: Sequence[nn.Parameter], hands: int) -> list[list[nn.Parameter]]:
    """Deal parameters in order, each to the hand with the fewest bytes by then: strided over the model, about equal."""
    found: list[list[nn.Parameter]] = [[] for _ in range(hands)]
    held = [0] * hands
    for parameter in parameters:
        least = held.index(min(held))
        found[least].append(parameter)
        held[least] += parameter.numel() * parameter.element_size()
    return found


def is_short(last_bytes: int, whole_bytes: int) -> bool:
    """Return whether a last bucket may overlap with the next round."""
    return SHORT * last_bytes <= whole_bytes


def bucket_bytes_of(parameters: Iterable[nn.Parameter]) -> int:
    """An eighth of their bytes, from 2 MiB to 256 MiB."""
    # While one bucket is mixed the links wait for it: a few are better than one. Each costs a message's latency: few
    # are better than many.
    known = (p for p in dict.fromkeys(parameters) if not isinstance(p, UninitializedParameter))
    whole = sum(p.numel() * p.element_size() for p in known)
    return min(max(-(-whole // BUCKETS), LEAST_BUCKET_BYTES), MOST_BUCKET_BYTES)


def message_bytes_of(parameters: Sequence[nn.Parameter]) -> int:
    """Bytes of a bucket of a message in which all parameters travel: `bucket_bytes_of` on a host, 1 GiB on a device."""
    return DEVICE_BUCKET_BYTES if any(p.device.type == "cuda" for p in parameters) else bucket_bytes_of(parameters)


def pack(
    parameters: Iterable[nn.Parameter],
    bucket_bytes: int | None = None,
    make: Callable[[Sequence[nn.Parameter]], Bucket] = Bucket,
) -> list[Bucket]:
    """Buckets over the given parameters, in order, one dtype and device each, each made by `make`; none over
    `bucket_bytes` (by default `message_bytes_of` them) unless one parameter is. Tied parameters count once; what is
    empty or not floating point or complex is left out. ValueError: `bucket_bytes` is not positive, or a lazy module has
    not seen its first batch."""
    parameters = list(parameters)
    if bucket_bytes is None:
        bucket_bytes = message_bytes_of(parameters)
    check_bucket_bytes(bucket_bytes)
    refuse_lazy(parameters)
    mixed = [p for p in parameters if p.numel() and (p.is_floating_point() or p.is_complex())]
    return [make(members) for members in chunked(mixed, bucket_bytes)]


def check_bucket_bytes(bucket_bytes: int | None) -> None:
    """ValueError for buckets of no bytes; None leaves their size to the default."""
    if bucket_bytes is not None and bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}: leave it out for the default")


def chunked(parameters: Iterable[nn.Parameter], most_bytes: int) -> list[list[nn.Parameter]]:
    """Distinct parameters of one dtype and device each, in order; none over `most_bytes` unless one parameter is."""
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
