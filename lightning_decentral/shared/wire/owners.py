"""Each tensor is changed on one device: of shards put together there (Muon under FSDP), or of what all hold alike."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_decentral.shared.compute.codec.blocks import key
from lightning_decentral.shared.compute.codec.codec import Codec, Frame
from lightning_decentral.shared.wire.gradients import parts
from lightning_decentral.shared.wire.transport import Message, Transport

Shape = tuple[int, ...]
InPlace = Callable[[Sequence[Tensor]], None]


def each_once(change: InPlace, shards: Sequence[Tensor], shapes: Sequence[Shape], over: Transport) -> None:
    """The shards become those of the changed wholes; each whole is changed on one device. Collective.

    Every shard travels once to its tensor's owner and once back, all for one owner in one message: 2 (L - 1) / L of
    the bytes in all, over L devices. In addition to the shards a device holds the tensors it owns, and all messages.

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


def by_owners(change: InPlace, tensors: Sequence[Tensor], codec: Codec, over: Transport, turn: int) -> int:
    """All workers hold the same tensors; each is changed by its owner, and all take what its codes mean. Collective.

    So the work is shared out, and replicas stay equal bit for bit. With `Plain()` it is the change itself. A worker
    sends its codes to each other one: (n - 1) / n of the bytes in the mean.

    Args:
        change: as for `each_once`.
        tensors: of one type and device.
        turn: how often this was called before; it draws the codec's noise.

    Returns:
        bytes that this worker sent.
    """
    owned_by = owners([tuple(tensor.shape) for tensor in tensors], over.size)
    of = [[t for t, owner in zip(tensors, owned_by, strict=True) if owner == rank] for rank in range(over.size)]
    mine, others = of[over.rank], [rank for rank in range(over.size) if rank != over.rank]
    received = {rank: _payload(codec, of[rank]) for rank in others if of[rank]}
    receives = [Message(rank, code, part) for rank, codes in received.items() for part, code in enumerate(codes)]
    sends: list[Message] = []
    if mine:
        change(mine)
        flat, codes = _flat(mine), _payload(codec, mine)
        codec.replace(flat, codes, Frame(key(over.rank, turn)))
        _unpack(flat, mine)
        sends = [Message(rank, code, part) for rank in others for part, code in enumerate(codes)]
    leaving, arriving = over.exchange(sends, receives)
    for pending in arriving:
        pending.wait()
    for rank, codes in received.items():
        room = _room(of[rank])
        codec.decode(codes, room, Frame())
        _unpack(room, of[rank])
    for pending in leaving:
        pending.wait()
    return sum(message.tensor.numel() * message.tensor.element_size() for message in sends)


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
    """Rows of each device, as `torch.chunk` gives them."""
    each = -(-rows // devices)
    ends = [min(rows, each * device) for device in range(1, devices + 1)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _travel(sent: Sequence[Sequence[Tensor]], received: Sequence[Sequence[Tensor]], over: Transport) -> None:
    """[device]: what goes to it, and where what comes from it is put; both sides list them in the same order."""
    others = [device for device in range(over.size) if device != over.rank]
    sends = [Message(to, _flat(sent[to]), 0) for to in others if _elements(sent[to])]
    receives = [Message(by, _room(received[by]), 0) for by in others if _elements(received[by])]
    leaving, arriving = over.exchange(sends, receives)
    for here, there in zip(sent[over.rank], received[over.rank], strict=True):
        there.copy_(here)
    for pending, message in zip(arriving, receives, strict=True):
        pending.wait()
        _unpack(message.tensor, received[message.peer])
    for pending in leaving:
        pending.wait()


def _payload(codec: Codec, tensors: Sequence[Tensor]) -> list[Tensor]:
    parts = codec.checked_parts(_elements(tensors), tensors[0].dtype)
    return [tensors[0].new_empty(part.elements, dtype=part.dtype) for part in parts]


def _elements(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _room(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].new_empty(_elements(tensors))


def _unpack(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    torch._foreach_copy_(list(tensors), parts(flat, tensors))
