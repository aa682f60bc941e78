"""Whole tensors out of shards, each on one device, which changes it and gives the parts back (Muon under FSDP)."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from lightning_decentral.shared.wire.transport import Message, Transport

Shape = tuple[int, ...]
InPlace = Callable[[Sequence[Tensor]], None]


def each_once(change: InPlace, shards: Sequence[Tensor], shapes: Sequence[Shape], over: Transport) -> None:
    """The shards become those of the changed wholes; each whole is changed on one device. Collective.

    Every shard travels once to its tensor's owner and once back, all for one owner in one message: 2 (L - 1) / L of
    the bytes in all, over L devices. Beside the shards a device holds the tensors it owns, and all messages.

    Args:
        change: of any number of tensors, in place; none depends on another.
        shards: this device's, of one type, cut along the first axis as `torch.chunk` cuts.
        shapes: of the wholes; on all devices the same.
    """
    owned_by = owners(shapes, over.size)
    of = [[k for k, owner in enumerate(owned_by) if owner == device] for device in range(over.size)]
    mine = of[over.rank]
    whole = [shards[k].new_empty(shapes[k]) for k in mine]
    rows = [list(tensor.split(row_counts(len(tensor), over.size))) for tensor in whole]
    theirs = [[row[device] for row in rows] for device in range(over.size)]
    away = [[shards[k] for k in of[device]] for device in range(over.size)]
    _travel(away, theirs, over)
    change(whole)
    _travel(theirs, away, over)


def owners(shapes: Sequence[Shape], devices: int) -> list[int]:
    """The device of each tensor: the one with the least to do when the largest are given out first.

    By the operations of products with their own transpose: elements x the shorter side.
    """
    cost = [torch.Size(s).numel() * min(s[0], torch.Size(s[1:]).numel()) for s in shapes]
    load, owned_by = [0] * devices, [0] * len(shapes)
    for k in sorted(range(len(shapes)), key=lambda k: -cost[k]):
        owned_by[k] = load.index(min(load))
        load[owned_by[k]] += cost[k]
    return owned_by


def row_counts(rows: int, devices: int) -> list[int]:
    """Of each device, as `torch.chunk` gives them."""
    each = -(-rows // devices)
    ends = [min(rows, each * device) for device in range(1, devices + 1)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _travel(sent: Sequence[Sequence[Tensor]], heard: Sequence[Sequence[Tensor]], over: Transport) -> None:
    """[device]: what goes to it, and where what comes from it is put; both sides list them in the same order."""
    others = [device for device in range(over.size) if device != over.rank]
    sends = [Message(to, _flat(sent[to]), 0) for to in others if _elements(sent[to])]
    receives = [Message(by, _room(heard[by]), 0) for by in others if _elements(heard[by])]
    leaving, arriving = over.exchange(sends, receives)
    for here, there in zip(sent[over.rank], heard[over.rank], strict=True):
        there.copy_(here)
    for pending, message in zip(arriving, receives, strict=True):
        pending.wait()
        _unpack(message.tensor, heard[message.peer])
    for pending in leaving:
        pending.wait()


def _elements(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _room(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].new_empty(_elements(tensors))


def _unpack(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    ends = accumulate(tensor.numel() for tensor in tensors)
    for tensor, end in zip(tensors, ends, strict=True):
        tensor.copy_(flat[end - tensor.numel() : end].view(tensor.shape))
