"""Packing: which parameters share a bucket, how large buckets are, and where the last one is cut."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from lightning_decentral.shared.compute.buckets import Bucket, BucketSpan
from lightning_decentral.shared.compute.layout.model import refuse_lazy

MOST_BUCKET_BYTES = 256 * 2**20
LEAST_BUCKET_BYTES = 2 * 2**20
DEVICE_BUCKET_BYTES = 2**30  # a device lands none of a round before all have come: few are better than many
BUCKETS = 8
SHORT = 16  # a last bucket of at most one part in so many may overlap with the next round
TAIL = 2 * SHORT
"""A long last bucket ends in a tail of one part in so many or, as parameters end, up to one in `SHORT`."""
LEAST_CUT_BYTES = 2**20  # smaller models aren't cut: another message would take as long as it saves


def with_tail(buckets: Sequence[Bucket]) -> list[Bucket | BucketSpan]:
    """Split the last bucket in two where it's long and has a place for that, so that the last one is short."""
    # The next round's messages may begin while the last bucket's are under way; were it longer, two neighbours' would
    # fill the queues on the way to a worker, and packets be dropped. Cut is also where nothing overlaps without a
    # delay, for one small message more: so a checkpoint fits both. A device sends all buckets at once.
    whole = sum(bucket.bytes for bucket in buckets)
    if whole < max(1, LEAST_CUT_BYTES) or is_short(buckets[-1].bytes, whole) or _on_device(buckets[-1].flat):
        return [*buckets]
    *others, last = buckets
    each = last.flat.element_size()
    place = last.border(-(-whole // TAIL // each), whole // SHORT // each)
    return (
        [*buckets]
        if place is None
        else [*others, BucketSpan(last, 0, place), BucketSpan(last, place, last.flat.numel())]
    )


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


def _on_device(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"


def bucket_bytes_of(parameters: Iterable[nn.Parameter]) -> int:
    """An eighth of their bytes, from 2 MiB to 256 MiB."""
    # While one bucket is mixed the links wait for it: a few are better than one. Each costs a message's latency: few
    # are better than many.
    known = (p for p in dict.fromkeys(parameters) if not isinstance(p, UninitializedParameter))
    whole = sum(p.numel() * p.element_size() for p in known)
    return min(max(-(-whole // BUCKETS), LEAST_BUCKET_BYTES), MOST_BUCKET_BYTES)


def message_bytes_of(parameters: Sequence[nn.Parameter]) -> int:
    """Bytes of a bucket of a message in which all parameters travel: `bucket_bytes_of` on a host, 1 GiB on a device."""
    return DEVICE_BUCKET_BYTES if any(map(_on_device, parameters)) else bucket_bytes_of(parameters)


def pack(
    parameters: Iterable[nn.Parameter],
    bucket_bytes: int | None = None,
    make: Callable[[Sequence[nn.Parameter]], Bucket] = Bucket,
) -> list[Bucket]:
    """Buckets over the given parameters, in order, one dtype and device each, each made by `make`; none over
    `bucket_bytes` (by default `message_bytes_of` them) unless one parameter is. Tied parameters count once; what is
    empty or not floating point or complex is left out.

    Raises:
        ValueError: `bucket_bytes` is not positive, or a lazy module has not seen its first batch.
    """
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
