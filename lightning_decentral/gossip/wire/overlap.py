"""Communication overlap: a round is encoded, sent, received and decoded while training computes.

On the CPU threads do that; a GPU queues a round's work by itself, and encodes and decodes on a second stream."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_decentral.gossip.compute.combine.combine import Combine
from lightning_decentral.gossip.wire.exchange import Copied, EarlyArrival, Exchange, Landed, MessageInFlight, Traffic
from lightning_decentral.gossip.wire.peer import Arrivals
from lightning_decentral.shared.compute import cuda
from lightning_decentral.shared.compute.buckets import is_short
from lightning_decentral.shared.compute.device import DeviceStopwatch, Future, WorkerThread

Result = TypeVar("Result")


def overlapped(exchange: Exchange[Any], device: torch.device, delay: int) -> Exchange[Any]:
    """Overlap an exchange with training where that helps. It doesn't at delay 0, where a round is mixed at once, nor
    for unencoded messages on a GPU, which cost one kernel on any stream (it corrects x and copies the next
    message). Under gloo the host waits for messages on a GPU, when they are mixed."""
    if not delay:
        return exchange
    if device.type == "cpu":
        return OverlapExchange(exchange)
    if isinstance(exchange, Arrivals) and exchange.coder.encodes and exchange.transport.queued:
        return StreamExchange(exchange, device)
    return exchange


class OverlapExchange(Exchange["Overlapped"]):
    """Runs another exchange on two threads of the host: one encodes and sends messages, one receives and mixes.

        training    copy |      forward, backward, update         | correct x
        leaving          | encode |  send |
        arriving         ... mix |        | wait, decode, mix |

    A training step waits only for a copy of the parameters and for the correction. Operations on every bucket have the
    order, and so the bits, of the inner exchange, which must be on the CPU with a transport of its own."""

    def __init__(self, inner: Exchange[Any]) -> None:
        self.inner = inner
        self.pool, self.coder, self.neighbours = inner.pool, inner.coder, inner.neighbours
        # Two threads, so that a round can be encoded while the round before is still received. Threads cost training
        # little: torch releases the interpreter lock within its operations.
        self._leaving, self._arriving = WorkerThread("gossip leaves"), WorkerThread("gossip arrives")
        self._before: list[Future[Tensor]] = []  # mixtures of the round before
        self._round: list[Overlapped] = []  # messages launched in this round
        self._departed: Future[None] | None = None
        self._admitted: list[int] = []
        self._last_overlaps = False
        self._wait_seconds = 0.0

    def admit(self, buckets: Sequence[Tensor], combine: Combine) -> None:
        if self._departed is not None:  # the leaving thread uses the inner exchange until it has sent its messages
            self._departed.result()
        self._admitted += [bucket.numel() * bucket.element_size() for bucket in buckets]
        self._last_overlaps = is_short(self._admitted[-1], sum(self._admitted)) if self._admitted else False
        self.inner.admit(buckets, combine)

    def launch(self, message: Tensor, step: int, place: int, copied: Copied | None = None) -> "Overlapped":
        """Launch a message. Memory until mixed: a copy, the inner exchange's memory, and decoded messages."""
        # A copy is sent: the correction subtracts the sent values, and updates change the parameters meanwhile.
        sent = copied.message if copied else self.pool.take(message).copy_(message)
        launched = self._leaving.send(partial(self.inner.launch, sent, step, place, Copied(sent)))
        part = Overlapped(self, sent, launched)
        self._round = [*self._round, part] if place else [part]
        # If the last bucket is short (`buckets.with_tail`), all others are sent before it, so that the links don't
        # idle while the last bucket is mixed and the next neighbours connect.
        if self._last_overlaps and len(self._round) == len(self._admitted) - 1:
            before = self._before[:-1]
            # Otherwise the leaving thread would wait for the earlier buckets before it encodes the last one.
            if all(landed.done() for landed in before):
                self._leave(self._round, before, step)
        return part

    def depart(self, launched: Sequence["Overlapped"], step: int) -> None:
        waiting = [part for part in launched if part.landed is None]
        if self._last_overlaps:
            self._leave(waiting[:-1], self._before[:-1], step)
            waiting = waiting[-1:]
        # A round is sent when the round before has arrived: two rounds to different neighbours at once would share
        # the links of hosts that still receive, and from then on no two hosts would finish together. If a step waits
        # for the link, two rounds at once take longer than one after the other; else the round before has arrived
        # long ago. Encoding the next round waits, too, so a rule that reads what it sent (`PushSum`) waits until the
        # last round but one has arrived.
        self._leave(waiting, self._before, step)
        self._before = [part.landed for part in launched if part.landed is not None]

    def _leave(self, parts: Sequence["Overlapped"], before: Sequence["Future[Tensor]"], step: int) -> None:
        if not parts:
            return
        # After a message that couldn't be sent, none may be sent: `send` checks the departure before, too.
        last = [] if self._departed is None else [self._departed]
        inner = [part.launched for part in parts]
        self._departed = self._leaving.send(partial(self._depart, before, step), *inner, *last)
        for part in parts:
            part.landed = self._arriving.send(lambda message, _: message.land(), part.launched, self._departed)

    def _depart(self, before: Sequence["Future[Tensor]"], step: int, *launched: MessageInFlight | None) -> None:
        for landed in before:
            landed.exception()  # waits; its own reader gets the error
        self.inner.depart([message for message in launched if message is not None], step)

    def awaited(self, future: "Future[Result]") -> Result:
        """Wait for a future, counted as training's wait, and return its result or raise its error."""
        began = perf_counter()
        future.exception()
        self._wait_seconds += perf_counter() - began
        return future.result()

    def traffic(self) -> Traffic:
        # The inner exchange's waits are the threads', and overlap. Only training's waits count.
        return replace(self.inner.traffic(), wait_seconds=self._wait_seconds)


@dataclass
class Overlapped(MessageInFlight):
    """Message in flight on the two threads: being encoded, then sent and received."""

    exchange: OverlapExchange
    sent: Tensor
    launched: "Future[MessageInFlight]"
    landed: "Future[Tensor] | None" = None

    def settle(self) -> Tensor:
        self.exchange.awaited(self.launched)
        return self.sent

    def land(self) -> Tensor:
        assert self.landed is not None, "land only what has departed"
        return self.exchange.awaited(self.landed)


class StreamExchange(Exchange["OnStream"]):
    """Exchanges codes on a GPU's second stream; only the copy of the parameters and the correction are on the first.

        training  copy |        forward, backward, update        | correct x
        meanwhile      | encode, send, wait, decode, judge |

    Estimates of codecs and buffers of messages are used on the second stream alone: the inner exchange's waits
    are those of the current stream."""

    def __init__(self, inner: Arrivals[Any], device: torch.device) -> None:
        self.inner: Arrivals[Any] = inner
        self.pool, self.coder, self.neighbours = inner.pool, inner.coder, inner.neighbours
        self._stream, self._waited = cuda.Stream(device), DeviceStopwatch()

    def admit(self, buckets: Sequence[Tensor], combine: Combine) -> None:
        self.inner.admit(buckets, combine)

    def launch(self, message: Tensor, step: int, place: int, copied: Copied | None = None) -> "OnStream":
        sent = self._copy(message, copied)
        # For the message, and for the last readers of buffers that were returned to the pool.
        self._stream.wait_stream(self.caller())
        with cuda.on(self._stream):
            inner = self.inner.launch(sent, step, place, Copied(sent))
            encoded = self._stream.record_event()
        sent.record_stream(self._stream)  # the caller's, which may drop it before it is encoded
        return OnStream(self, sent, inner, encoded)

    def depart(self, launched: Sequence["OnStream"], step: int) -> None:
        with cuda.on(self._stream):
            self.inner.depart([message.inner for message in launched], step)
            for message in launched:
                message.memory = message.inner.arrive()
                message.arrived = self._stream.record_event()

    def caller(self) -> cuda.Stream:
        """The current CUDA stream, on which training runs."""
        return cuda.current_stream(self._stream.device)

    def arrived(self, message: "OnStream") -> EarlyArrival:
        """Make the caller's stream wait for a message, and return it."""
        caller = self.caller()
        assert message.arrived is not None, "land only what has departed"
        self._waited.during([partial(caller.wait_event, message.arrived)])
        # The allocator mustn't reuse the memory before the caller has read it.
        for tensor in message.memory:
            tensor.record_stream(caller)
        return message.inner

    def traffic(self) -> Traffic:
        # The inner exchange's waits are the second stream's, and overlap.
        return replace(self.inner.traffic(), wait_seconds=self._waited.seconds())


@dataclass
class OnStream(MessageInFlight):
    """Message in flight on a GPU's second stream."""

    exchange: StreamExchange
    sent: Tensor
    inner: EarlyArrival
    encoded: cuda.Event
    arrived: cuda.Event | None = None
    memory: Sequence[Tensor] = ()  # tensors of the second stream that mixing reads

    @property
    def corrects(self) -> bool:  # type: ignore[override]
        return self.inner.corrects

    def settle(self) -> Tensor:
        self.exchange.caller().wait_event(self.encoded)
        return self.sent

    def land(self) -> Tensor:
        return self.exchange.arrived(self).land()

    def correct(self, x: Tensor, rate: float, copied: Copied | None = None) -> None:
        self.exchange.arrived(self).correct(x, rate, copied)

    def keep(self, corrects: bool) -> Landed:
        return self.exchange.arrived(self).keep(corrects)
