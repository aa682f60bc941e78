"""Distributes work on whole tensors (Muon's matrices, say) over devices: each tensor is changed on its owner alone."""

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
    """Change whole tensors that lie in shards, each on one device, and return their shards. Collective. `change`
    changes any number of them in place, each independently of the others; `shards`: this device's, of one type, cut
    along the first axis as `torch.chunk` cuts; `shapes`: of the whole tensors, equal on all devices.

    Every shard is sent once to its tensor's owner and once back, all for one owner in one message: 2 (L - 1) / L of the
    bytes in all, over L devices. In addition to the shards a device holds the tensors it owns, and all messages."""
    owned_by = owners(shapes, over.size)
    owned = [[k for k, owner in enumerate(owned_by) if owner == device] for device in range(over.size)]
    mine = owned[over.rank]
    whole = [shards[k].new_empty(shapes[k]) for k in mine]
    rows = [list(tensor.split(row_counts(len(tensor), over.size))) for tensor in whole]
    theirs = [[row[device] for row in rows] for device in range(over.size)]
    away = [[shards[k] for k in owned[device]] for device in range(over.size)]
    _travel(away, theirs, over)
    change(whole)
    _travel(theirs, away, over)


def by_owners(change: InPlace, tensors: Sequence[Tensor], codec: Codec, over: Transport, turn: int) -> int:
    """Change tensors of one type and device that all workers hold alike: each on its owner, by `change` as in
    `each_once`, whose codes all workers decode. Returns the bytes that this worker sent. Collective.

    The work is distributed, and replicas stay equal bit for bit; the codec `Plain()` sends tensors exactly. A worker
    sends its codes to each other worker: (n - 1) / n of the tensors' bytes on average. `turn`, the number of earlier
    calls, seeds the codec's rounding."""
    owned_by = owners([tuple(tensor.shape) for tensor in tensors], over.size)
    owned = [[t for t, owner in zip(tensors, owned_by, strict=True) if owner == rank] for rank in range(over.size)]
    mine, others = owned[over.rank], [rank for rank in range(over.size) if rank != over.rank]
    received = {rank: _payload(codec, owned[rank]) for rank in others if owned[rank]}
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
        room = _room(owned[rank])
        codec.decode(codes, room, Frame())
        _unpack(room, owned[rank])
    for pending in leaving:
        pending.wait()
    return sum(message.tensor.numel() * message.tensor.element_size() for message in sends)


def owners(shapes: Sequence[Shape], devices: int) -> list[int]:
    """Return the owner of each tensor: the device with the least work so far, the largest tensors first.

    Work is counted as operations of a product with the own transpose: elements x the shorter side."""
    cost = [torch.Size(s).numel() * min(s[0], torch.Size(s[1:]).numel()) for s in shapes]
    load, owned_by = [0] * devices, [0] * len(shapes)
    for k in sorted(range(len(shapes)), key=lambda k: -cost[k]):
        owned_by[k] = load.index(min(load))
        load[owned_by[k]] += cost[k]
    return owned_by


def row_counts(rows: int, devices: int) -> list[int]:
    """Return the number of rows on each device, as `torch.chunk` cuts them."""
    each = -(-rows // devices)
    ends = [min(rows, each * device) for device in range(1, devices + 1)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _travel(sent: Sequence[Sequence[Tensor]], received: Sequence[Sequence[Tensor]], over: Transport) -> None:
    """Send sent[device] to each device, and fill received[device] from it; both sides list tensors in one order."""
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
