"""Communication overlap: a round is encoded, sent, awaited and decoded during training, and mixed on the host.

On the host by threads; on a device, which queues a round's work by itself, codes have a stream of their own.
"""

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
        self._before: list[Future[Tensor]] = []  # the landings of the round before
        self._round: list[Overlapped] = []  # what was launched of this one
        self._departed: Future[None] | None = None
        self._admitted: list[int] = []
        self._last_overlaps = False
        self._wait_seconds = 0.0

    def admit(self, buckets: Sequence[Tensor], combine: Combine) -> None:
        if self._departed is not None:  # the inner exchange is the leaving thread's until that has sent what it has
            self._departed.result()
        self._admitted += [bucket.numel() * bucket.element_size() for bucket in buckets]
        self._last_overlaps = is_short(self._admitted[-1], sum(self._admitted)) if self._admitted else False
        self.inner.admit(buckets, combine)

    def launch(self, message: Tensor, step: int, place: int, copied: Copied | None = None) -> "Overlapped":
        """Memory until landed: a copy, the inner exchange's, and where messages are decoded what they become."""
        # A copy leaves: what was sent is subtracted at the landing, and updates change the parameters until then.
        sent = copied.message if copied else self.pool.take(message).copy_(message)
        launched = self._leaving.send(partial(self.inner.launch, sent, step, place, Copied(sent)))
        part = Overlapped(self, sent, launched)
        self._round = [*self._round, part] if place else [part]
        # Only the last bucket overlaps, where it is short (`buckets.with_tail`): all others leave when it alone is
        # missing, so that the links don't rest while it is mixed and the next neighbours find each other.
        if self._last_overlaps and len(self._round) == len(self._admitted) - 1:
            before = self._before[:-1]
            # Else the leaving thread would wait for those before it encodes the last bucket.
            if all(landed.done() for landed in before):
                self._leave(self._round, before, step)
        return part

    def depart(self, launched: Sequence["Overlapped"], step: int) -> None:
        waiting = [part for part in launched if part.landed is None]
        if self._last_overlaps:
            self._leave(waiting[:-1], self._before[:-1], step)
            waiting = waiting[-1:]
        # A round leaves when the one before has landed: rounds that go to different neighbours at once would meet on
        # the links of hosts that still receive, and from then on no two hosts finish together. On a link that is
        # what a step waits for they take longer than one after the other; elsewhere the round before has landed long
        # ago. Encoding the next one waits with it, so a rule that asks what it sent (`PushSum`) waits until the last
        # round but one has landed.
        self._leave(waiting, self._before, step)
        self._before = [part.landed for part in launched if part.landed is not None]

    def _leave(self, parts: Sequence["Overlapped"], before: Sequence["Future[Tensor]"], step: int) -> None:
        if not parts:
            return
        # Where something couldn't leave, nothing may leave after it: `send` asks the departure before, too.
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
        """Wait for a future, and return its result or raise its error; the training waits meanwhile."""
        began = perf_counter()
        future.exception()
        self._wait_seconds += perf_counter() - began
        return future.result()

    def traffic(self) -> Traffic:
        # The inner exchange's waits are those of the threads: hidden. What counts is the training's.
        return replace(self.inner.traffic(), wait_seconds=self._wait_seconds)


@dataclass
class Overlapped(MessageInFlight):
    """A message between launch and landing: being made ready, then sent and received."""

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
        self._stream, self._waited = cuda.Stream(device), DeviceStopwatch()

    def admit(self, buckets: Sequence[Tensor], combine: Combine) -> None:
        self.inner.admit(buckets, combine)

    def launch(self, message: Tensor, step: int, place: int, copied: Copied | None = None) -> "OnStream":
        sent = self._copy(message, copied)
        # For the message, and for the last readers of the buffers that went back to the pool.
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
        """The current stream."""
        return cuda.current_stream(self._stream.device)

    def arrived(self, message: "OnStream") -> EarlyArrival:
        """Have the caller's stream wait for a message."""
        caller = self.caller()
        assert message.arrived is not None, "land only what has departed"
        self._waited.during([partial(caller.wait_event, message.arrived)])
        # Not to be given away before the caller has read it.
        for tensor in message.memory:
            tensor.record_stream(caller)
        return message.inner

    def traffic(self) -> Traffic:
        # The inner exchange's waits are this stream's: hidden.
        return replace(self.inner.traffic(), wait_seconds=self._waited.seconds())


@dataclass
class OnStream(MessageInFlight):
    """A message between launch and landing."""

    exchange: StreamExchange
    sent: Tensor
    inner: EarlyArrival
    encoded: cuda.Event
    arrived: cuda.Event | None = None
    memory: Sequence[Tensor] = ()  # tensors of the second stream that the landing reads

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
