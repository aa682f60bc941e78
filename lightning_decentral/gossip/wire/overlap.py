"""The host's share of a round (encode, send, wait, decode, mix), done beside the training and not within it."""

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from time import perf_counter
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from lightning_decentral.gossip.compute.combine.combine import Combine
from lightning_decentral.gossip.wire.exchange import Around, Exchange, Land, Traffic
from lightning_decentral.shared.compute.buckets import Matrix, Pool, is_short
from lightning_decentral.shared.compute.device import HostStopwatch

Result = TypeVar("Result")


class Future(Generic[Result]):
    """A call under way on a lane."""

    def __init__(self, call: Callable[[], Result]) -> None:
        self._call: Callable[[], Result] | None = call
        self._done = threading.Event()
        self._result: Result
        self._error: BaseException | None = None

    def run(self) -> None:
        """On the lane."""
        assert self._call is not None
        try:
            with torch.no_grad():  # a new thread would have it on
                self._result = self._call()
        except BaseException as error:
            self._error = error
        self._call = None  # and the tensors that it holds
        self._done.set()

    def wait(self) -> None:
        """Until it's done, however it ended."""
        self._done.wait()

    def done(self) -> bool:
        """Whether it is."""
        return self._done.is_set()

    def result(self) -> Result:
        """What it returned, or its error."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result


@dataclass
class _Part:
    """Buckets between `start` and landing."""

    started: Future[Land]
    first: int
    landed: Future[list[Tensor]] | None = None
    departed: float = 0.0

    def land(self) -> list[Tensor]:
        """On the lane of arrivals."""
        return self.started.result()()


@dataclass
class OverlapExchange(Around):
    """Another exchange on two threads of the host: one makes messages ready and sends them, one hears and mixes.

        training    copy |      forward, backward, update         | correct x
        leaving          | encode |  send |
        arriving         ... mix |        | wait, decode, mix |

    The step pays for a copy of the parameters and for the correction that landed; torch lets go of the interpreter
    within its operations. The order of operations on every bucket is the inner exchange's own, so are the bits.

    Two threads, since a round is to be encoded while the one before is still awaited. It leaves when that has landed:
    rounds that go to different neighbours at once would meet on the links of hosts that still hear another, and from
    then on no two hosts finish together. On a link that is what a step waits for they take longer than one after the
    other; elsewhere the round before has landed long ago. Encoding the next one waits with it, so a rule that asks what
    it sent (`PushSum`) waits until the last round but one has landed.

    Only the last bucket overlaps, where it is short (`buckets.with_tail`): all others leave when it alone is missing,
    so that the links don't rest while it is mixed and the next neighbours find each other.

    Args:
        inner: on the host, with nobody else on its transport.
    """

    _open: list[_Part] = field(default_factory=list, init=False)
    _last: Future[Land] | None = field(default=None, init=False)
    _departed: Future[None] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._leaving, self._arriving = WorkerThread("gossip leaves"), WorkerThread("gossip arrives")
        self._before: list[Future[list[Tensor]]] = []
        self._departing: list[Future[list[Tensor]]] = []
        self._admitted: list[int] = []
        self._waited, self._in_flight_seconds = HostStopwatch(), 0.0
        self._rounds = 0

    @property
    def pool(self) -> Pool:  # type: ignore[override]
        """The inner exchange's."""
        return self.inner.pool

    def admit(self, buckets: Sequence[Tensor], matrices: Sequence[Sequence[Matrix]], combine: Combine) -> None:
        """Once what is under way has left."""
        if self._departed is not None:
            self._departed.result()
        self._admitted += [bucket.numel() * bucket.element_size() for bucket in buckets]
        self.inner.admit(buckets, matrices, combine)

    def start(self, message: Sequence[Tensor], step: int, first: int = 0) -> Land:
        """Memory until landed: the inner exchange's, and where messages are decoded one copy of what they become."""
        part = _Part(self._leaving.send(lambda: self.inner.start(message, step, first)), first)
        self._open.append(part)
        self._last = part.started
        nearly = all(landed.done() for landed in self._before[:-1])
        if nearly and self._overlaps and first + len(message) == len(self._admitted) - 1:
            self._leave(self._open, self._before[:-1])
            self._open = []

        def land() -> list[Tensor]:
            assert part.landed is not None, "land only what has departed"
            self._waited.start()
            part.landed.wait()
            self._waited.stop()
            if not first:
                self._in_flight_seconds += perf_counter() - part.departed
                self._rounds += 1
            return part.landed.result()

        return land

    def depart(self) -> None:
        """Send and hear, once what was started is ready and the round before has landed, the last bucket of each for
        itself where it overlaps; nothing from what couldn't be made ready on."""
        if self._overlaps:
            self._leave(self._open[:-1], self._before[:-1])
            self._open = self._open[-1:]
        self._leave(self._open, self._before)
        self._before, self._departing, self._open = self._departing or self._before, [], []

    @property
    def _overlaps(self) -> bool:
        return bool(self._admitted) and is_short(self._admitted[-1], sum(self._admitted))

    def _leave(self, parts: Sequence[_Part], before: Sequence[Future[list[Tensor]]]) -> None:
        if not parts:
            return
        self._departed = departed = self._leaving.send(partial(_send, parts, before, self._departed, self.inner))
        for part in parts:
            part.departed = perf_counter()
            part.landed = self._arriving.send(_after(departed, part))
            self._departing.append(part.landed)

    def settle(self) -> None:
        """Wait for what was started last, or raise its error."""
        if self._last is not None:
            self._waited.start()
            self._last.wait()
            self._waited.stop()
            self._last.result()

    def codec_error(self) -> float | None:
        """Of all that was started; where nothing is encoded nobody waits to hear that."""
        if not self.encodes:
            return None
        self.settle()
        return self.inner.codec_error()

    def state_dict(self) -> dict[str, Any]:
        """The inner one's; call it when all has landed."""
        self.settle()
        return self.inner.state_dict()

    def traffic(self) -> Traffic:
        """Bytes that have left so far; rounds that have landed, and the seconds that the training waited: those of the
        threads are hidden."""
        left, waited = self.inner.traffic(), self._waited.seconds()
        return replace(left, rounds=self._rounds, wait_seconds=waited, in_flight_seconds=self._in_flight_seconds)


def _send(
    parts: Sequence[_Part], before: Sequence[Future[list[Tensor]]], last: Future[None] | None, inner: Exchange
) -> None:
    for part in parts:
        part.started.result()
    for landed in before:
        landed.wait()
    if last is not None:
        last.result()  # where something couldn't leave, nothing may leave after it
    inner.depart()


def _after(departed: Future[None], part: _Part) -> Land:
    def land() -> list[Tensor]:
        departed.result()
        return part.land()

    return land


def beside(exchange: Exchange, device: torch.device, delay: int) -> Exchange:
    """The same, beside the training where there is something beside which it could be done.

    At delay 0 a round lands where it's launched. A device queues the work of a round by itself. With a delay over 1 a
    round may arrive before others are encoded that leave before it lands: not where it would change them.
    """
    early = delay > 1 and exchange.learns
    return OverlapExchange(exchange) if delay and device.type == "cpu" and not early else exchange


END_SECONDS = 1.0


class WorkerThread:
    """Begins with its first errand and ends when nobody holds it any more.

    A daemon: at the end of a program that failed, a transfer that never ends doesn't keep it alive for more than a
    second. That is why it's no `ThreadPoolExecutor`, which joins its threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._errands: SimpleQueue[Future[Any] | None] | None = None

    def send(self, call: Callable[[], Result]) -> Future[Result]:
        """Do it after all that was sent before."""
        if self._errands is None:
            self._errands = SimpleQueue()
            thread = threading.Thread(target=_work, args=(self._errands,), name=self._name, daemon=True)
            thread.start()
            _alive[thread] = self._errands
            weakref.finalize(self, self._errands.put, None)
        errand = Future(call)
        self._errands.put(errand)
        return errand


_alive: weakref.WeakKeyDictionary[threading.Thread, SimpleQueue[Future[Any] | None]] = weakref.WeakKeyDictionary()


@atexit.register
def _end() -> None:
    """A thread that comes back from torch when the interpreter is gone would end the program by a signal."""
    lanes = list(_alive.items())
    for _, errands in lanes:
        errands.put(None)
    end = time.monotonic() + END_SECONDS
    for thread, _ in lanes:
        thread.join(max(0.0, end - time.monotonic()))


def _work(errands: "SimpleQueue[Future[Any] | None]") -> None:
    while (errand := errands.get()) is not None:
        errand.run()
        del errand  # with its result
