"""A world of workers in one process: transports whose messages are copied from one worker's memory to another's.

Each worker calls from a thread of its own, as it would from a process of its own; what it computes doesn't depend on
who comes first. Sums are taken in the order of ranks; gloo's order is another from three workers on.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count
from threading import Condition, RLock
from typing import Any

from torch import Tensor

from lightning_decentral.shared.wire.pending import PeerLost, Pending
from lightning_decentral.shared.wire.transport import Disjoint, Message, Transport, Wire


@dataclass
class Mailboxes:
    """What was sent and not yet taken, by address; in the order of sending.

    Args:
        wait_seconds: after which who waits for a message ends.
    """

    wait_seconds: float = 600.0
    _boxes: dict[Hashable, deque[Any]] = field(default_factory=lambda: defaultdict(deque), init=False)
    _lock: RLock = field(default_factory=RLock, init=False)
    _waiting: dict[Hashable, Condition] = field(default_factory=dict, init=False)
    _closed: bool = field(default=False, init=False)
    _unwanted: set[Hashable] = field(default_factory=set, init=False)

    def put(self, addresses: Sequence[Hashable], tensor: Tensor) -> None:
        """One copy for all of them: who takes it only reads."""
        self.hand(addresses, tensor.clone())

    def hand(self, addresses: Sequence[Hashable], value: Any) -> None:
        """The value itself."""
        with self._lock:
            for address in addresses:
                if address in self._unwanted:
                    self._unwanted.remove(address)
                else:
                    self._boxes[address].append(value)
                    # Who waits for another message isn't woken.
                    if waiting := self._waiting.get(address):
                        waiting.notify_all()

    def take(self, address: Hashable) -> Any:
        with self._lock:
            if not self._boxes.get(address):
                self._wait_for(address)
            if not self._boxes.get(address):
                raise PeerLost(f"nothing came to {address}: another worker of this rehearsal has ended")
            found = self._boxes[address].popleft()
            if not self._boxes[address]:
                del self._boxes[address]
            return found

    def _wait_for(self, address: Hashable) -> None:
        waiting = self._waiting.setdefault(address, Condition(self._lock))
        waiting.wait_for(lambda: self._closed or bool(self._boxes.get(address)), self.wait_seconds)
        self._waiting.pop(address, None)

    def forget(self, addresses: Sequence[Hashable]) -> None:
        """Nobody takes the one message that has come to each of them, or will."""
        with self._lock:
            for address in addresses:
                if self._boxes.pop(address, None) is None:
                    self._unwanted.add(address)

    def full(self, address: Hashable) -> bool:
        with self._lock:
            return bool(self._boxes.get(address))

    def close(self) -> None:
        """Who waits, or will, ends."""
        with self._lock:
            self._closed = True
            for waiting in self._waiting.values():
                waiting.notify_all()


@dataclass
class _Arriving:
    """Done once: what lies at the addresses is handed over.

    Args:
        once: the addresses are no other message's: when nobody waited for it, what comes is forgotten.
    """

    boxes: Mailboxes
    addresses: Sequence[Hashable]
    hand_over: Callable[[list[Tensor]], Any]
    once: bool = False
    waited: bool = False

    def __del__(self) -> None:
        if self.once and not self.waited:
            self.boxes.forget(self.addresses)

    def wait(self) -> None:
        if not self.waited:
            self.waited = True
            self.hand_over([self.boxes.take(address) for address in self.addresses])

    def done(self) -> bool:
        return self.waited or all(map(self.boxes.full, self.addresses))


class InProcessTransport(Transport):
    """One worker's end of a group. Scattering and flat gathering are not offered.

    Args:
        name: of the group, the same for all its workers and no other group's.
        rank: in the group.
    """

    def __init__(self, boxes: Mailboxes, name: Hashable, rank: int, size: int) -> None:
        self.group, self.rank, self.size = None, rank, size
        self._boxes, self._name, self._calls = boxes, name, 0

    def close(self) -> None:
        """Nothing is open."""

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> tuple[list[Pending], list[Pending]]:
        for peer, tensor, tag in sends:
            self._boxes.put([(self._name, self.rank, peer, tag)], tensor)
        incoming = [self._arriving([(self._name, m.peer, self.rank, m.tag)], _into(m.tensor)) for m in receives]
        return [self._arriving([], _nothing) for _ in sends], incoming

    def all_reduce(self, tensor: Tensor) -> Pending:
        return self._collective(tensor, lambda rows: _sum_into(tensor, rows))

    def all_gather(self, tensor: Tensor) -> tuple[Pending, list[Tensor]]:
        found = [tensor.new_empty(tensor.shape) for _ in range(self.size)]
        return self._collective(tensor, lambda rows: [a.copy_(b) for a, b in zip(found, rows, strict=True)]), found

    def reduce(self, tensor: Tensor, target: int) -> Pending:
        return self._between(range(self.size), [target], tensor, lambda rows: _sum_into(tensor, rows))

    def broadcast(self, tensor: Tensor, source: int = 0) -> Pending:
        others = [rank for rank in range(self.size) if rank != source]
        return self._between([source], others, tensor, _into(tensor))

    def _collective(self, own: Tensor, hand_over: Callable[[list[Tensor]], Any]) -> Pending:
        return self._between(range(self.size), range(self.size), own, hand_over)

    def _between(
        self, sources: Sequence[int], targets: Sequence[int], own: Tensor, hand_over: Callable[[list[Tensor]], Any]
    ) -> Pending:
        """Each target takes what each source has."""
        call = self._name, "collective", self._calls
        self._calls += 1
        if self.rank in sources:
            self._boxes.put([(*call, self.rank, target) for target in targets], own)
        if self.rank not in targets:
            return self._arriving([], _nothing)
        return _Arriving(self._boxes, [(*call, source, self.rank) for source in sources], hand_over, once=True)

    def _arriving(self, addresses: Sequence[Hashable], hand_over: Callable[[list[Tensor]], Any]) -> Pending:
        return _Arriving(self._boxes, addresses, hand_over)


def _into(tensor: Tensor) -> Callable[[list[Tensor]], Any]:
    return lambda rows: tensor.copy_(rows[0])


def _sum_into(tensor: Tensor, rows: list[Tensor]) -> None:
    tensor.copy_(rows[0])
    for row in rows[1:]:
        tensor.add_(row)


def _nothing(rows: list[Tensor]) -> None:
    return


def in_process_wire(boxes: Mailboxes, rank: int, size: int) -> Wire:
    """What one of so many workers talks over. As everywhere, all make groups in the same order."""
    numbers = count()

    def group(groups: Disjoint | None) -> Transport | None:
        number = next(numbers)
        members = next((list(ranks) for ranks in groups or [range(size)] if rank in ranks), [])
        name = number, *members
        return InProcessTransport(boxes, name, members.index(rank), len(members)) if members else None

    world, flags, roll = (InProcessTransport(boxes, name, rank, size) for name in ("world", "flags", "roll"))
    return Wire(world, flags, roll, None, group, group, boxes.close, boxes.close)


def in_process_broadcast(boxes: Mailboxes, rank: int, size: int) -> Callable[[Any], Any]:
    """What hands worker 0's value, the object itself, to all; worker 0 waits for nobody. Collective."""
    calls = count()

    def broadcast(value: Any) -> Any:
        call = "value", next(calls)
        if rank:
            return boxes.take((*call, rank))
        boxes.hand([(*call, target) for target in range(1, size)], value)
        return value

    return broadcast
