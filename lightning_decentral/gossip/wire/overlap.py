"""Communication overlap: a round is encoded, sent, awaited and decoded during training, and mixed on the host.

On the host by threads; on a device, which queues a round's work by itself, codes have a stream of their own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_decentral.gossip.compute.combine.combine import Combine
from lightning_decentral.gossip.wire.exchange import (
    Arrivals,
    Arriving,
    Copied,
    Correction,
    Exchange,
    Landed,
    Started,
    Traffic,
)
from lightning_decentral.shared.compute import cuda
from lightning_decentral.shared.compute.buckets import is_short
from lightning_decentral.shared.compute.device import DeviceStopwatch, Future, WorkerThread

Result = TypeVar("Result")


def overlapped(exchange: Exchange[Any], device: torch.device, delay: int) -> Exchange[Any]:
    """The same exchange, overlapped with the training where there is something to overlap with. At delay 0 a round
    lands where it's launched. On a device messages as they are cost one kernel, in the training's way wherever it is
    queued: it corrects, and copies what leaves next. By gloo the host waits for them, at the landing."""
    if not delay:
        return exchange
    if device.type == "cpu":
        return OverlapExchange(exchange)
    if isinstance(exchange, Arrivals) and exchange.coder.encodes and exchange.transport.queued:
        return StreamExchange(exchange, device)
    return exchange


class OverlapExchange(Exchange["Overlapped"]):
    """Another exchange on two threads of the host: one makes messages ready and sends them, one receives and mixes.

        training    copy |      forward, backward, update         | correct x
        leaving          | encode |  send |
        arriving         ... mix |        | wait, decode, mix |

    The step pays for a copy of the parameters and for the correction that landed. The order of operations on every
    bucket is the inner exchange's own, so are the bits.

    Args:
        inner: on the host, with nobody else on its transport.
    """

    def __init__(self, inner: Exchange[Any]) -> None:
        self.inner = inner
        self.pool, self.coder, self.neighbours = inner.pool, inner.coder, inner.neighbours
        # Two threads, since a round is to be encoded while the one before is still awaited. That they are threads
        # costs the training little: torch lets go of the interpreter within its operations.
        self._leaving, self._arriving = WorkerThread("gossip leaves"), WorkerThread("gossip arrives")
        self._before: list[Future[list[Tensor]]] = []  # the landings of the round before
        self._round: list[Overlapped] = []  # what has started of this one
        self._departed: Future[None] | None = None
        self._admitted: list[int] = []
        self._last_overlaps = False
        self._rounds, self._wait_seconds, self._in_flight_seconds = 0, 0.0, 0.0

    def admit(self, buckets: Sequence[Tensor], combine: Combine) -> None:
        if self._departed is not None:  # the inner exchange is the leaving thread's until that has sent what it has
            self._departed.result()
        self._admitted += [bucket.numel() * bucket.element_size() for bucket in buckets]
        self._last_overlaps = is_short(self._admitted[-1], sum(self._admitted)) if self._admitted else False
        self.inner.admit(buckets, combine)

    def start(self, message: Sequence[Tensor], step: int, first: int = 0) -> "Overlapped":
        """Memory until landed: the inner exchange's, and where messages are decoded one copy of what they become."""
        part = Overlapped(self, self._leaving.send(partial(self.inner.start, message, step, first)), first)
        self._round = [*self._round, part] if first else [part]
        # Only the last bucket overlaps, where it is short (`buckets.with_tail`): all others leave when it alone is
        # missing, so that the links don't rest while it is mixed and the next neighbours find each other.
        if self._last_overlaps and len(self._round) == len(self._admitted) - 1:
            before = self._before[:-1]
            # Else the leaving thread would wait for those before it encodes the last bucket.
            if all(landed.done() for landed in before):
                self._leave(self._round, before, step)
        return part

    def depart(self, started: Sequence["Overlapped"], step: int) -> None:
        waiting = [part for part in started if part.landed is None]
        if self._last_overlaps:
            self._leave(waiting[:-1], self._before[:-1], step)
            waiting = waiting[-1:]
        # A round leaves when the one before has landed: rounds that go to different neighbours at once would meet on
        # the links of hosts that still receive, and from then on no two hosts finish together. On a link that is
        # what a step waits for they take longer than one after the other; elsewhere the round before has landed long
        # ago. Encoding the next one waits with it, so a rule that asks what it sent (`PushSum`) waits until the last
        # round but one has landed.
        self._leave(waiting, self._before, step)
        self._before = [part.landed for part in started if part.landed is not None]

    def _leave(self, parts: Sequence["Overlapped"], before: Sequence["Future[list[Tensor]]"], step: int) -> None:
        if not parts:
            return
        self._departed = self._leaving.send(partial(self._send, parts, before, self._departed, step))
        for part in parts:
            part.departed = perf_counter()
            part.landed = self._arriving.send(partial(part.arrive, self._departed))

    def _send(
        self,
        parts: Sequence["Overlapped"],
        before: Sequence["Future[list[Tensor]]"],
        last: "Future[None] | None",
        step: int,
    ) -> None:
        started = [part.started.result() for part in parts]
        for landed in before:
            landed.wait()
        if last is not None:
            last.result()  # where something couldn't leave, nothing may leave after it
        self.inner.depart(started, step)

    def awaited(self, future: "Future[Result]") -> Result:
        """Wait for a future, and return its result or raise its error; the training waits meanwhile."""
        began = perf_counter()
        future.wait()
        self._wait_seconds += perf_counter() - began
        return future.result()

    def landed(self, part: "Overlapped") -> list[Tensor]:
        assert part.landed is not None, "land only what has departed"
        mixed = self.awaited(part.landed)
        if not part.first:
            self._in_flight_seconds += perf_counter() - part.departed
            self._rounds += 1
        return mixed

    def traffic(self) -> Traffic:
        # The inner exchange's waits are those of the threads: hidden. What counts is the training's.
        left, waited = self.inner.traffic(), self._wait_seconds
        return replace(left, rounds=self._rounds, wait_seconds=waited, in_flight_seconds=self._in_flight_seconds)


@dataclass
class Overlapped(Started):
    """Buckets between start and landing: being made ready, then sent and received."""

    exchange: OverlapExchange
    started: "Future[Started]"
    first: int
    landed: "Future[list[Tensor]] | None" = None
    departed: float = 0.0

    def settle(self) -> None:
        self.exchange.awaited(self.started)

    def land(self) -> list[Tensor]:
        return self.exchange.landed(self)

    def arrive(self, departed: "Future[None]") -> list[Tensor]:
        departed.result()
        return self.started.result().land()


class StreamExchange(Exchange["OnStream"]):
    """A device's exchange of codes, on a second stream but for the copy of the parameters and the correction.

        training  copy |        forward, backward, update        | correct x
        meanwhile      | encode, send, wait, decode, judge |

    All that codes remember, and the buffers of messages, are touched on this stream alone.

    Args:
        inner: of codes, its waits those of the current stream.
    """

    def __init__(self, inner: Arrivals[Any], device: torch.device) -> None:
        self.inner: Arrivals[Any] = inner
        self.pool, self.coder, self.neighbours = inner.pool, inner.coder, inner.neighbours
        self._depart: Callable[[Sequence[Any], int], None] = inner.depart
        self._stream, self._waited = cuda.Stream(device), DeviceStopwatch()

    def admit(self, buckets: Sequence[Tensor], combine: Combine) -> None:
        self.inner.admit(buckets, combine)

    def start(self, message: Sequence[Tensor], step: int, first: int = 0) -> "OnStream":
        # For the message, and for the last readers of the buffers that went back to the pool.
        self._stream.wait_stream(self.caller())
        with cuda.on(self._stream):
            started = self.inner.start(message, step, first)
            encoded = self._stream.record_event()
        for tensor in message:  # the caller's, which may drop it before it is encoded
            tensor.record_stream(self._stream)
        return OnStream(self, started, encoded)

    def depart(self, started: Sequence["OnStream"], step: int) -> None:
        with cuda.on(self._stream):
            self._depart([part.inner for part in started], step)
            for part in started:
                part.inner.arrive()
                part.arrived = self._stream.record_event()

    def caller(self) -> cuda.Stream:
        """The current stream."""
        return cuda.current_stream(self._stream.device)

    def landing(self, part: "OnStream") -> Arriving:
        """The caller's stream waits for it."""
        caller = self.caller()
        assert part.arrived is not None, "land only what has departed"
        self._waited.during([partial(caller.wait_event, part.arrived)])
        # Not to be given away before the caller has read it.
        for tensor in part.inner.belongings():
            tensor.record_stream(caller)
        return part.inner

    def traffic(self) -> Traffic:
        # The inner exchange's waits are this stream's: hidden.
        return replace(self.inner.traffic(), wait_seconds=self._waited.seconds())


@dataclass
class OnStream(Started):
    """Buckets between start and landing."""

    exchange: StreamExchange
    inner: Arriving
    encoded: cuda.Event
    arrived: cuda.Event | None = None

    @property
    def correction(self) -> Correction | None:
        return None if self.inner.correction is None else self

    def settle(self) -> None:
        self.exchange.caller().wait_event(self.encoded)

    def land(self) -> list[Tensor]:
        return self.exchange.landing(self).land()

    def correct(self, x: Tensor, rate: float, copied: Copied | None = None) -> None:
        self._corrects().correct(x, rate, copied)

    def keep(self) -> Landed:
        return self._corrects().keep()

    def _corrects(self) -> Correction:
        correction = self.exchange.landing(self).correction
        assert correction is not None
        return correction
