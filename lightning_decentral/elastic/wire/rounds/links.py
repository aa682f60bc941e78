"""A transport over the members of one view: a message that doesn't come any more is counted, and no error.

CPU tensors, point to point. Rounds are distinguished by number: who is in another view, or skipped a round, isn't
waited for.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from lightning_decentral.elastic.plan.view import View, place_of
from lightning_decentral.elastic.wire.endpoint import Endpoint
from lightning_decentral.elastic.wire.sockets.frames import raw_bytes
from lightning_decentral.elastic.wire.sockets.mesh import Slot
from lightning_decentral.shared.wire.pending import Pending
from lightning_decentral.shared.wire.transport import Message, Transport


@dataclass
class IncomingMessage:
    """A message under way to this member. Where nothing comes `tensor` keeps what it holds, and `lost` is called."""

    worker: Endpoint
    view: View
    slot: Slot
    tensor: Tensor
    lost: Callable[[], object]
    came: bool = False

    def wait(self) -> None:
        client, (sender, _, round, _) = self.worker.lobby_client, self.slot
        found = self.worker.mesh.take(self.slot, lambda: client.state.expects(self.view, round, sender))
        if found is None or len(found) != self.tensor.numel() * self.tensor.element_size():  # lost, or another model's
            self.lost()
        else:
            self.tensor.copy_(torch.frombuffer(found, dtype=self.tensor.dtype).view(self.tensor.shape))
            self.came = True

    def done(self) -> bool:
        """Return whether it is there; False after `wait`: it doesn't come any more."""
        return self.came


class Post(ABC):
    """Messages of which only the newest count, and for which nobody waits."""

    rank: int
    size: int

    @abstractmethod
    def post(self, sends: Sequence[Message]) -> int:
        """A copy of all of a round's messages goes to those members that have been sent what they were sent before;
        others get a later round. Returns the bytes."""

    @abstractmethod
    def newest(self, slots: int) -> dict[int, tuple[int, list[bytearray]]]:
        """{rank: (round, its messages)} of those of whom a whole round has come that wasn't taken yet."""


class ViewTransport(Transport, Post):
    """Sends and receives among the members of a view; `lost` is called for each message that doesn't come. There are
    no collectives."""

    def __init__(self, worker: Endpoint, view: View, lost: Callable[[], object]) -> None:
        self.group = None  # no process group: connections of sockets
        self.rank, self.size = view.members.index(worker.name), len(view.members)  # the oldest has rank 0
        self.round = 0
        self._worker, self._view, self._lost = worker, view, lost

    def close(self) -> None:
        return  # the connections are the worker's

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> tuple[list[Pending], list[Pending]]:
        """Exchange all messages of the round `self.round`."""
        leaving: list[Pending] = [self._send(m, slot) for m, slot in _numbered(sends)]
        arriving = list[Pending]()
        for m, nth in _numbered(receives):
            slot = Slot(self._view.members[m.peer], self._view.key, self.round, nth)
            arriving.append(IncomingMessage(self._worker, self._view, slot, m.tensor, self._lost))
        return leaving, arriving

    def post(self, sends: Sequence[Message]) -> int:
        free = {m.peer for m in sends if self._worker.mesh.idle(self._view.members[m.peer])}  # slow links get fewer
        leaving = [(m, slot) for m, slot in _numbered(sends) if m.peer in free]
        for message, slot in leaving:
            self._send(Message(message.peer, message.tensor.clone(), message.tag), slot)
        return sum(m.tensor.numel() * m.tensor.element_size() for m, _ in leaving)

    def newest(self, slots: int) -> dict[int, tuple[int, list[bytearray]]]:
        found = {
            rank: self._worker.mesh.newest(name, self._view.key, slots)
            for rank, name in enumerate(self._view.members)
            if rank != self.rank
        }
        return {rank: round for rank, round in found.items() if round is not None}

    def _send(self, message: Message, slot: int) -> Pending:
        to = self._view.members[message.peer]
        raw = raw_bytes(message.tensor)  # in place: nobody writes it until it has left
        return self._worker.mesh.send(to, place_of(to), self._view.key, self.round, slot, raw)


def _numbered(messages: Sequence[Message]) -> list[tuple[Message, int]]:
    """Each with its place among those of its peer, the same on both ends."""
    places: dict[int, count[int]] = defaultdict(count)
    return [(m, next(places[m.peer])) for m in messages]
