"""Gathers and broadcasts Python values, serialized by `plain`; an unsendable value is an error on all workers."""

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_decentral.shared.wire.plain import NotPlain, Serialized, lengths, pack, unpack
from lightning_decentral.shared.wire.transport import Message, Transport, connected, everyone

HEAD = 0  # tag of a head in `collect_objects`; its tensors have the following ones


class Sizes(NamedTuple):
    """Bytes of a head and of all tensors behind it; `refused`: the head is the reason why the value can't be sent."""

    head: int
    payload: int
    refused: int


def gather_objects(over: Transport, value: Any) -> list[Any]:
    """Gather the value of every worker on all workers, in order of rank; for small values. NotPlain on every worker,
    where one's value can't be sent."""
    mine, sizes = _everyones(over, value)
    own = torch.zeros(max(s.head + s.payload for s in sizes), dtype=torch.uint8)  # rows as long as the longest head
    own[: sizes[over.rank].head + sizes[over.rank].payload] = torch.cat([_tensor(mine.head), *mine.payload])
    found = []
    for row, size in zip(gather_rows(over, own.to(_place(over))).cpu(), sizes, strict=True):
        head, rest = _data(row[: size.head]), row[size.head : size.head + size.payload]
        # Copies, as bytes within a row aren't aligned.
        found.append(unpack(Serialized(head, [part.clone() for part in rest.split(lengths(head))])))
    return found


def gather_world(value: Any) -> list[Any]:
    """Gather values over the default process group; this worker's value alone where there is no process group."""
    return gather_objects(everyone(), value) if connected() else [value]


def collect_objects(over: Transport, value: Any) -> list[Any]:
    """Gather the value of every worker on worker 0, in order of rank; elsewhere nothing. No tensor is held twice.
    NotPlain on every worker, where one's value can't be sent."""
    mine, sizes = _everyones(over, value)
    if over.rank > 0:
        for tag, part in enumerate((_tensor(mine.head), *mine.payload), HEAD):
            over.exchange([Message(0, part.to(_place(over)), tag)], [])[0][0].wait()
        return []
    return [unpack(mine), *(unpack(_receive(over, rank, sizes[rank].head)) for rank in range(1, over.size))]


def broadcast_world(value: Any, source: int = 0) -> Any:
    """Send the source's value to every worker; unchanged where there is no process group. NotPlain on every worker,
    where the value can't be sent."""
    if not connected():
        return value
    over = everyone()
    mine, own = _packed(value, over.rank) if over.rank == source else (Serialized(b"", []), Sizes(0, 0, 0))
    size, _, refused = _sent(over, torch.tensor(own), source).tolist()
    head = _data(_sent(over, _tensor(mine.head) if over.rank == source else _empty(size), source))
    if refused:
        raise NotPlain(head.decode())
    payload = mine.payload if over.rank == source else list(map(_empty, lengths(head)))
    payload = [_sent(over, tensor, source) for tensor in payload]
    return value if over.rank == source else unpack(Serialized(head, payload))


def _packed(value: Any, rank: int) -> tuple[Serialized, Sizes]:
    """Serialize a value; for a value that can't be sent, the reason why, since the others wait for a message."""
    try:
        found, refused = pack(value), 0
    except NotPlain as error:
        found, refused = Serialized(f"worker {rank} can't send a value to the others: {error}".encode(), []), 1
    return found, Sizes(len(found.head), sum(map(len, found.payload)), refused)


def _everyones(over: Transport, value: Any) -> tuple[Serialized, list[Sizes]]:
    """Return (this worker's serialized value, the sizes of all workers'). NotPlain on all, where one can't be sent."""
    mine, own = _packed(value, over.rank)
    sizes = [Sizes(*row) for row in gather_rows(over, torch.tensor(own).to(_place(over))).tolist()]
    if any(s.refused for s in sizes):
        reasons = gather_objects(over, mine.head.decode() if own.refused else "")
        raise NotPlain(next(filter(None, reasons)))
    return mine, sizes


def _receive(over: Transport, source: int, head_bytes: int) -> Serialized:
    def receive(size: int, tag: int) -> Tensor:
        part = _empty(size).to(_place(over))
        over.exchange([], [Message(source, part, tag)])[1][0].wait()
        return part.cpu()

    head = _data(receive(head_bytes, HEAD))
    return Serialized(head, [receive(n, tag) for tag, n in enumerate(lengths(head), HEAD + 1)])


def gather_rows(
    over: Transport, tensor: Tensor, meet: Callable[[Callable[[], None]], Any] = lambda wait: wait()
) -> Tensor:
    """Gather every worker's tensor, [size, ...]. Collective; `meet` runs the call that waits for the others."""
    pending, rows = over.all_gather(tensor.detach().contiguous())
    meet(pending.wait)
    return torch.stack(rows)


def check_same_call(over: Transport, what: str) -> None:
    """Check that all workers are about to make the same collective call: a different one would be misread, or end the
    process in the transport's own thread. Collective; one sum of two numbers. RuntimeError: on every worker, with its
    own call, where another worker makes a different call."""
    code = int.from_bytes(hashlib.sha256(what.encode()).digest()[:3], "big")
    sums = torch.tensor([code, code * code], device=_place(over))
    over.all_reduce(sums).wait()
    # n sum c^2 > (sum c)^2 unless all are equal, so that each worker sees a difference.
    if sums.tolist() != [over.size * code, over.size * code * code]:
        raise RuntimeError(
            f"worker {over.rank} came to {what}, another worker to something else: let all workers make the same "
            "collective calls (self.log with sync_dist=True on all or none, as many validation loaders)"
        )


def reduce_alike(
    reduce: Callable[[Any, Any, Any], Tensor], phase: Callable[[], str], tensor: Any, group: Any, op: Any
) -> Tensor:
    """Call `reduce(tensor, group, op)` after a check that all workers reduce the same; without a check on a device, for
    which the host would wait, and in another group. Collective. `phase` returns text on what this worker does, its kind
    first (steps may be counted differently). RuntimeError: on every worker, where one reduces something else."""
    if isinstance(tensor, Tensor) and tensor.device.type == "cpu" and group is None and connected():
        kind = f"{op}, {tensor.dtype} {list(tensor.shape)}"
        check_same_call(everyone(), f"a reduction ({kind}; {phase().split()[0]})")
    return reduce(tensor, group, op)


def _sent(over: Transport, tensor: Tensor, source: int) -> Tensor:
    there = tensor.to(_place(over))
    over.broadcast(there, source).wait()
    return there.cpu()


def _place(over: Transport) -> torch.device:
    return torch.device("cuda" if over.queued else "cpu")  # NCCL takes no tensors on the host


def _empty(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _data(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()
