"""Communication overlap: a round is encoded, sent, awaited, decoded and mixed on threads beside the training."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_decentral.gossip.compute.combine.combine import Combine
from lightning_decentral.gossip.wire.exchange import Exchange, Started, Traffic
from lightning_decentral.shared.compute.buckets import Matrix, is_short
from lightning_decentral.shared.compute.device import Future, WorkerThread

Result = TypeVar("Result")


def overlapped(exchange: Exchange[Any], device: torch.device, delay: int) -> Exchange[Any]:
    """The same exchange beside the training, where there is something beside which it could be done. At delay 0 a round
    lands where it's launched, and a device queues the work of a round by itself."""
    return OverlapExchange(exchange) if delay and device.type == "cpu" else exchange


class OverlapExchange(Exchange["Overlapped"]):
    """Another exchange on two threads of the host: one makes messages ready and sends them, one hears and mixes.

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
        self._departed: Future[None] | None = None
        self._admitted: list[int] = []
        self._last_overlaps = False
        self._rounds, self._wait_seconds, self._in_flight_seconds = 0, 0.0, 0.0

    def admit(self, buckets: Sequence[Tensor], matrices: Sequence[Sequence[Matrix]], combine: Combine) -> None:
        if self._departed is not None:  # the inner exchange is the leaving thread's until that has sent what it has
            self._departed.result()
        self._admitted += [bucket.numel() * bucket.element_size() for bucket in buckets]
        self._last_overlaps = is_short(self._admitted[-1], sum(self._admitted)) if self._admitted else False
        self.inner.admit(buckets, matrices, combine)

    def start(self, message: Sequence[Tensor], step: int, first: int = 0) -> "Overlapped":
        """Memory until landed: the inner exchange's, and where messages are decoded one copy of what they become."""
        return Overlapped(self, self._leaving.send(partial(self.inner.start, message, step, first)), first)

    def offer(self, started: Sequence["Overlapped"], step: int) -> None:
        # Only the last bucket overlaps, where it is short (`buckets.with_tail`): all others leave when it alone is
        # missing, so that the links don't rest while it is mixed and the next neighbours find each other.
        if self._last_overlaps and len(started) == len(self._admitted) - 1:
            before = self._before[:-1]
            # Else the leaving thread would wait for those before it encodes the last bucket.
            if all(landed.done() for landed in before):
                self._leave([*started], before, step)  # more are to come into the caller's list

    def depart(self, started: Sequence["Overlapped"], step: int) -> None:
        waiting = [part for part in started if part.landed is None]
        if self._last_overlaps:
            self._leave(waiting[:-1], self._before[:-1], step)
            waiting = waiting[-1:]
        # A round leaves when the one before has landed: rounds that go to different neighbours at once would meet on
        # the links of hosts that still hear another, and from then on no two hosts finish together. On a link that is
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
        """What it returned, or its error; the training waits for it meanwhile."""
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
    """Buckets between start and landing: being made ready, then sent and heard."""

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
