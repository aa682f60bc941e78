"""NCCL that isn't there: workers as threads, each with a simulated device; a communicator is a stream of it.

Transfers of a communicator run strictly in order; sends and receives of a pair meet by order, not by tag; those of one
call complete together, and a send not before somebody has heard it. A wait is the current stream's. Messages are read
and written when their turn has come: who overwrites one too soon sends something else.
"""

import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor

from lightning_decentral.shared.compute import cuda
from lightning_decentral.shared.wire.pending import Pending
from lightning_decentral.shared.wire.transport import GlooTransport, Message, Transport
from tests import simulated
from tests.simulated.streams import Engine, Event, Stream
from tests.simulated.tensors import Simulated
from tests.world import world

T = TypeVar("T")


class Network:
    """What has been sent and not yet heard, and what collectives have been given."""

    numbers = itertools.count()

    def __init__(self) -> None:
        self.number = next(Network.numbers)
        self.messages: dict[Hashable, deque[Tensor]] = defaultdict(deque)
        self.heard: dict[Hashable, int] = defaultdict(int)
        self.given: dict[Hashable, dict[int, Tensor]] = defaultdict(dict)
        self.lock, self.failed = threading.Lock(), threading.Event()

    def put(self, key: Hashable, message: Tensor) -> int:
        """How many have to be heard until this one has been."""
        with self.lock:
            self.messages[key].append(message.clone())
            return self.heard[key] + len(self.messages[key])

    def has(self, key: Hashable) -> bool:
        with self.lock:
            return bool(self.messages[key])

    def take(self, key: Hashable) -> Tensor:
        with self.lock:
            self.heard[key] += 1
            return self.messages[key].popleft()

    def heard_of(self, key: Hashable) -> int:
        with self.lock:
            return self.heard[key]

    def rows(self, key: Hashable) -> dict[int, Tensor]:
        """What is given under this key, now and later. Locked as every look is: one at what isn't there yet makes it,
        and of two at once the second one's would take the place of the first one's."""
        with self.lock:
            return self.given[key]

    def give(self, key: Hashable, rank: int, tensor: Tensor) -> None:
        with self.lock:
            self.given[key][rank] = tensor.clone()

    def gave(self, key: Hashable) -> int:
        with self.lock:
            return len(self.given[key])


@dataclass
class OnStream:
    """A transfer that a communicator's stream has taken in."""

    event: Event

    def wait(self) -> None:
        self.event.wait()

    def done(self) -> bool:
        return self.event.query()


class Group:
    """What torch takes for the process group of a communicator."""

    def __init__(self, over: "QueuedTransport", name: str) -> None:
        self.over, self.group_name = over, name

    def rank(self) -> int:
        return self.over.rank

    def size(self) -> int:
        return self.over.size


class QueuedTransport(Transport):
    """One worker's end of a communicator.

    Args:
        rank: among its `size` workers.
        name: of the communicator: alike on all its workers, another for another one.
        aborted: set by this worker: its transfers end at once, and leave what they would have filled as it was.
    """

    queued = True

    def __init__(self, network: Network, rank: int, size: int, name: Hashable, aborted: threading.Event) -> None:
        self.rank, self.size, self._aborted = rank, size, aborted
        self.group = Group(self, f"{network.number} {name}")
        self._network, self._name, self._calls = network, name, itertools.count()
        self._stream: Any = cuda.Stream()

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> tuple[list[Pending], list[Pending]]:
        stream = self._behind_caller()
        rests: list[Callable[[], bool]] = []
        for message in sends:
            send, heard = self._sent(message)
            stream.then(send)
            rests.append(heard)
        for message in receives:
            stream.then(*self._heard(message))
        stream.then(*self._until(lambda: all(heard() for heard in rests), lambda: None))
        done = OnStream(stream.record_event())
        return [done for _ in sends], [done for _ in receives]

    def _sent(self, message: Message) -> tuple[Callable[[], None], Callable[[], bool]]:
        """(sends it, whether it has been heard)"""
        inner, key, until = _inner(message.tensor), (self._name, self.rank, message.peer), list[int]()
        return lambda: until.append(self._network.put(key, inner)), lambda: self._network.heard_of(key) >= until[0]

    def _heard(self, message: Message) -> tuple[Callable[[], object], Callable[[], bool]]:
        inner, key = _inner(message.tensor), (self._name, message.peer, self.rank)
        return self._until(lambda: self._network.has(key), lambda: inner.copy_(self._network.take(key)))

    def _until(
        self, ready: Callable[[], bool], run: Callable[[], object]
    ) -> tuple[Callable[[], None], Callable[[], bool]]:
        """For `Stream.then`."""
        return lambda: None if self._aborted.is_set() else run(), lambda: self._aborted.is_set() or ready()

    def _together(self, given: Tensor, finish: Callable[[list[Tensor]], object]) -> Pending:
        """Everybody gives a tensor; `finish` sees all of them, in order of rank."""
        key, network, mine = (self._name, next(self._calls)), self._network, _inner(given)
        stream = self._behind_caller()
        stream.then(lambda: network.give(key, self.rank, mine))
        rows = network.rows(key)
        finished = lambda: finish([rows[rank] for rank in range(self.size)])  # noqa: E731
        stream.then(*self._until(lambda: network.gave(key) == self.size, finished))
        return OnStream(stream.record_event())

    def _behind_caller(self) -> Stream:
        stream: Stream = self._stream
        stream.wait_stream(simulated.current())
        return stream

    def all_reduce(self, tensor: Tensor) -> Pending:
        inner = _inner(tensor)
        return self._together(tensor, lambda rows: inner.copy_(torch.stack(rows).sum(0, dtype=inner.dtype)))

    def reduce(self, tensor: Tensor, target: int) -> Pending:
        inner = _inner(tensor)
        return self._together(
            tensor, lambda rows: inner.copy_(torch.stack(rows).sum(0) if self.rank == target else inner)
        )

    def all_gather_into(self, whole: Tensor, part: Tensor) -> Pending:
        inner = _inner(whole)
        return self._together(part, lambda rows: inner.view(self.size, -1).copy_(torch.stack(rows)))

    def all_gather(self, tensor: Tensor) -> tuple[Pending, list[Tensor]]:
        outs = [torch.empty_like(tensor) for _ in range(self.size)]
        inners = [_inner(out) for out in outs]
        return self._together(tensor, lambda rows: [i.copy_(r) for i, r in zip(inners, rows, strict=True)]), outs

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> Pending:
        inner = _inner(part)
        return self._together(
            whole, lambda rows: inner.copy_(torch.stack(rows).sum(0).view(self.size, -1)[self.rank].view_as(inner))
        )

    def broadcast(self, tensor: Tensor, source: int = 0) -> Pending:
        inner = _inner(tensor)
        return self._together(tensor, lambda rows: inner.copy_(rows[source]))


TYPES = {torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool}


def _inner(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, Simulated), "NCCL takes nothing from the host"
    assert tensor.is_floating_point() or tensor.dtype in TYPES, f"NCCL has no {tensor.dtype}"
    return tensor.inner


class Make:
    """One worker's way to its communicators.

    Attributes:
        hosts: between their hosts.
        aborted: whose setting ends what this worker's device waits for.
    """

    def __init__(self, network: Network, group: Any) -> None:
        self.hosts, self.aborted = GlooTransport(group), threading.Event()
        self._network, self._numbers = network, itertools.count()

    def __call__(self) -> QueuedTransport:
        """One more, of all workers."""
        return QueuedTransport(self._network, self.hosts.rank, self.hosts.size, next(self._numbers), self.aborted)

    def group(self, groups: Sequence[Sequence[int]] | None) -> QueuedTransport | None:
        """Of these, which share no worker, this one's; None where it is in none."""
        number, rank = next(self._numbers), self.hosts.rank
        members = next((list(ranks) for ranks in groups or [range(self.hosts.size)] if rank in ranks), [])
        if not members:
            return None
        place = members.index(self.hosts.rank), len(members)
        return QueuedTransport(self._network, *place, (number, *members), self.aborted)


def device_world(size: int, worker: Callable[[Make, Engine], T], seed: int = 0) -> list[T]:
    """[worker of rank 0, ...]: each has a device, whose schedule is drawn by `seed` and its rank."""
    network = Network()

    def run(group: Any) -> T:
        with simulated.at(97 * seed + group.rank()) as engine:
            engine.given_up = network.failed
            try:
                return worker(Make(network, group), engine)
            except BaseException:
                network.failed.set()
                raise

    with simulated.door():
        return world(size, run, seconds=45.0)


@contextmanager
def without_waiting(engine: Engine) -> Iterator[None]:
    """AssertionError for whatever makes the host wait for the device, with the line that asked."""
    before = len(engine.waits)
    yield
    assert not engine.waits[before:], engine.waits[before:]


@contextmanager
def losses_read() -> Iterator[None]:
    """A planted defect: hosts read what each backward begins with."""
    backward = Tensor.backward

    def reading(self: Tensor, *args: Any, **kwargs: Any) -> None:
        float(self.detach())
        backward(self, *args, **kwargs)

    with mock.patch.object(Tensor, "backward", reading):
        yield


@contextmanager
def sent_overwritten(here: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """A planted defect: what is given to a communicator is somebody else's again before its stream has read it.

    Args:
        here: whether it is planted where the call comes from.
    """
    exchange, all_reduce = QueuedTransport.exchange, QueuedTransport.all_reduce

    def exchanged(self: QueuedTransport, sends: Sequence[Message], receives: Sequence[Message]) -> Any:
        pending = exchange(self, sends, receives)
        for message in sends if here() else []:
            message.tensor.detach().zero_()
        return pending

    def reduced(self: QueuedTransport, tensor: Tensor) -> Pending:
        pending = all_reduce(self, tensor)
        if here():
            tensor.detach().zero_()
        return pending

    with mock.patch.multiple(QueuedTransport, exchange=exchanged, all_reduce=reduced):
        yield
