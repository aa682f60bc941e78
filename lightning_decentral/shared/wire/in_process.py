"""Transports between workers in threads of one process: messages go from one worker's memory to another's.

Each worker calls from a thread of its own, as it would from a process of its own. One thread runs at a time
(`ThreadTurn`): a worker that waits for a message lets another run. Results don't depend on which thread comes first.
Sums are taken in the order of ranks; gloo's order differs from three workers on."""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from threading import Condition, Lock, RLock, get_ident
from typing import Any

import torch
from torch import Tensor

from lightning_decentral.shared.wire.pending import PeerLost, Pending
from lightning_decentral.shared.wire.transport import Disjoint, Message, Transport, Wire


class ThreadTurn:
    """Lock that lets one thread run at a time. Threads that run at once would take the interpreter from each other at
    each call of torch, which costs more than a second processor gains."""

    def __init__(self) -> None:
        self._lock, self._whose = Lock(), 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._whose = get_ident()

    def __exit__(self, *_: object) -> None:
        self._whose = 0
        self._lock.release()

    @contextmanager
    def passed_on(self) -> Iterator[None]:
        """Context in which other threads may run; does nothing where this thread hasn't the lock."""
        if self._whose != get_ident():
            yield
            return
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()


class Lent:
    """A sent tensor that its owner leaves unchanged until it calls `settle`; later readers get a copy."""

    def __init__(self, tensor: Tensor, readers: int) -> None:
        self._tensor, self._missing, self._lock = tensor, readers, Lock()  # number of readers still to come

    def read(self, take: Callable[[Tensor], Any]) -> None:
        """Read the tensor as one of the readers, without changing it."""
        with self._lock:
            take(self._tensor)
            self._missing -= 1

    def settle(self) -> None:
        with self._lock:
            if self._missing > 0:
                self._tensor = self._tensor.clone()


@dataclass
class Mailboxes:
    """Messages that were sent and not yet received, by address, in the order of sending."""

    wait_seconds: float = 600.0  # seconds after which a wait for a message ends
    _boxes: dict[Hashable, deque[Any]] = field(default_factory=lambda: defaultdict(deque), init=False)
    _lock: RLock = field(default_factory=RLock, init=False)
    _waiting: dict[Hashable, Condition] = field(default_factory=dict, init=False)
    _closed: bool = field(default=False, init=False)
    _unwanted: set[Hashable] = field(default_factory=set, init=False)
    turn: ThreadTurn = field(default_factory=ThreadTurn, init=False)  # given to another thread while a worker waits

    def lend(self, addresses: Sequence[Hashable], tensor: Tensor) -> Lent:
        """Send the tensor to all addresses without a copy, until `settle`."""
        lent = Lent(tensor, len(addresses))
        self.hand(addresses, lent)
        return lent

    def hand(self, addresses: Sequence[Hashable], value: Any) -> None:
        with self._lock:
            for address in addresses:
                if address in self._unwanted:
                    self._unwanted.remove(address)
                else:
                    self._boxes[address].append(value)
                    # Only threads that wait for this address are woken.
                    if waiting := self._waiting.get(address):
                        waiting.notify_all()

    def take(self, address: Hashable) -> Any:
        if not self.full(address):
            with self.turn.passed_on(), self._lock:
                waiting = self._waiting.setdefault(address, Condition(self._lock))
                waiting.wait_for(lambda: self._closed or bool(self._boxes.get(address)), self.wait_seconds)
                self._waiting.pop(address, None)
        with self._lock:
            if not self._boxes.get(address):
                raise PeerLost(f"no message came to {address}: another worker of this rehearsal has ended")
            found = self._boxes[address].popleft()
            if not self._boxes[address]:
                del self._boxes[address]
            return found

    def forget(self, addresses: Sequence[Hashable]) -> None:
        """Drop the one message that has come to each address, or will: no worker receives it."""
        with self._lock:
            for address in addresses:
                if self._boxes.pop(address, None) is None:
                    self._unwanted.add(address)

    def full(self, address: Hashable) -> bool:
        with self._lock:
            return bool(self._boxes.get(address))

    def close(self) -> None:
        """End every wait for a message, now and later."""
        with self._lock:
            self._closed = True
            for waiting in self._waiting.values():
                waiting.notify_all()


@dataclass
class _Arriving:
    """Handle of messages in flight: the first wait hands over the messages at the addresses."""

    boxes: Mailboxes
    addresses: Sequence[Hashable] = ()
    hand_over: Callable[[list[Lent]], Any] = len  # no messages to receive
    own: Lent | None = None  # this worker's sent tensors, settled first: received values may be written into them
    once: bool = False  # addresses of this message alone: if it's never waited for, it's dropped
    waited: bool = False

    def __del__(self) -> None:
        if self.once and not self.waited:
            self.boxes.forget(self.addresses)

    def wait(self) -> None:
        if not self.waited:
            self.waited = True
            rows = [self.boxes.take(address) for address in self.addresses]
            if self.own is not None:
                self.own.settle()
            self.hand_over(rows)

    def done(self) -> bool:
        return self.waited or all(map(self.boxes.full, self.addresses))


class InProcessTransport(Transport):
    """Transport of one worker of a group in threads, without scattering and flat gathering. `name`: the group's name,
    equal for all its workers and unique."""

    def __init__(self, boxes: Mailboxes, name: Hashable, rank: int, size: int) -> None:
        self.group, self.rank, self.size = None, rank, size
        self._boxes, self._name, self._calls = boxes, name, 0

    def close(self) -> None:
        """Do nothing: a transport between threads opens nothing."""

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> tuple[list[Pending], list[Pending]]:
        to: dict[int, list[Hashable]] = {}  # addresses by tensor, which is sent once to all of them
        for peer, tensor, tag in sends:
            to.setdefault(id(tensor), []).append((self._name, self.rank, peer, tag))
        tensors = {id(m.tensor): m.tensor for m in sends}
        lent = {place: self._boxes.lend(addresses, tensors[place]) for place, addresses in to.items()}
        places = [[(self._name, m.peer, self.rank, m.tag)] for m in receives]
        pairs = zip(places, receives, strict=True)
        incoming: list[Pending] = [_Arriving(self._boxes, at, _into(m.tensor)) for at, m in pairs]
        return [_Arriving(self._boxes, own=lent[id(m.tensor)]) for m in sends], incoming

    def all_reduce(self, tensor: Tensor) -> Pending:
        return self._between(range(self.size), range(self.size), tensor, self._sum_into(tensor))

    def all_gather(self, tensor: Tensor) -> tuple[Pending, list[Tensor]]:
        found = [tensor.clone() for _ in range(self.size)]
        others = [row for rank, row in enumerate(found) if rank != self.rank]

        def hand_over(rows: list[Lent]) -> None:
            for own, row in zip(others, rows, strict=True):
                row.read(own.copy_)

        return self._between(range(self.size), range(self.size), tensor, hand_over), found

    def reduce(self, tensor: Tensor, target: int) -> Pending:
        return self._between(range(self.size), [target], tensor, self._sum_into(tensor))

    def broadcast(self, tensor: Tensor, source: int = 0) -> Pending:
        others = [rank for rank in range(self.size) if rank != source]
        return self._between([source], others, tensor, _into(tensor))

    def _between(
        self, sources: Sequence[int], targets: Sequence[int], own: Tensor, hand_over: Callable[[list[Lent]], Any]
    ) -> Pending:
        """Send the sources' tensors to each target; a target's wait passes the other sources' tensors on."""
        call = self._name, "collective", self._calls
        self._calls += 1
        others = [target for target in targets if target != self.rank] if self.rank in sources else []
        lent = self._boxes.lend([(*call, self.rank, target) for target in others], own) if others else None
        if self.rank not in targets:
            return _Arriving(self._boxes, own=lent)
        addresses = [(*call, source, self.rank) for source in sources if source != self.rank]
        return _Arriving(self._boxes, addresses, hand_over, lent, once=True)

    def _sum_into(self, tensor: Tensor) -> Callable[[list[Lent]], Any]:
        """Sum in the order of ranks: (those before this one) + this one + those behind, one by one."""

        def hand_over(rows: list[Lent]) -> None:
            first, behind = rows[: self.rank], rows[self.rank :]
            if len(first) > 1:
                total = torch.empty_like(tensor)
                first[0].read(total.copy_)
                for row in first[1:]:
                    row.read(total.add_)
                tensor.add_(total)
            else:  # a + b is b + a
                behind = rows
            for row in behind:
                row.read(tensor.add_)

        return hand_over


def _into(tensor: Tensor) -> Callable[[list[Lent]], Any]:
    return lambda rows: rows[0].read(tensor.copy_)


def in_process_wire(boxes: Mailboxes, rank: int, size: int) -> Wire:
    """Return the transports of one of `size` workers in threads. All must make groups in the same order."""
    numbers = count()

    def group(groups: Disjoint | None) -> Transport | None:
        number = next(numbers)
        members = next((list(ranks) for ranks in groups or [range(size)] if rank in ranks), [])
        name = number, *members
        return InProcessTransport(boxes, name, members.index(rank), len(members)) if members else None

    world, flags, roll = (InProcessTransport(boxes, name, rank, size) for name in ("world", "flags", "roll"))
    return Wire(world, flags, roll, None, group, group, boxes.close, boxes.close)


def in_process_broadcast(boxes: Mailboxes, rank: int, size: int) -> Callable[[Any], Any]:
    """Return a function that gives all workers worker 0's value, the object itself, without worker 0 waiting."""
    calls = count()

    def broadcast(value: Any) -> Any:
        call = "value", next(calls)
        if rank:
            return boxes.take((*call, rank))
        boxes.hand([(*call, target) for target in range(1, size)], value)
        return value

    return broadcast
