"""Hierarchical all-gather exchange: each device of an island exchanges a part, then the island shares what it heard."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from lightning_decentral.gossip.compute.combine.combine import Combine
from lightning_decentral.gossip.compute.integrity import Sick
from lightning_decentral.gossip.wire.exchange import Exchange, Started, Traffic
from lightning_decentral.shared.compute import cuda
from lightning_decentral.shared.compute.buckets import Pool
from lightning_decentral.shared.compute.device import DeviceStopwatch, stopwatch
from lightning_decentral.shared.wire.transport import Transport


@dataclass
class GatherExchange(Exchange["Parts"]):
    """mixed[p] = sum_j w_ij sent_j[p] for this device's part p; then every device gets every part.

    A bucket of n elements has L equal parts for L devices: every byte of a message crosses the network card of the
    island's node once.

    Args:
        inner: exchanges between the devices at this one's place in every island.
        inside: the devices of this island, in order of place, for this alone.

    Source: the two-level scheme of the parameters' exchange, Wang et al. 2410.11998, section 4.
    """

    inner: Exchange[Any]
    inside: Transport
    device: torch.device
    pool: Pool = field(default_factory=Pool, init=False)

    def __post_init__(self) -> None:
        self.coder, self.neighbours = self.inner.coder, self.inner.neighbours
        self._waited = stopwatch(self.device)
        # By NCCL the gather, too, is hidden behind the next step; by gloo it waits for the landing.
        self._order = SideStream(self.device) if self.inside.queued else AtLanding()

    def admit(self, buckets: Sequence[Tensor], combine: Combine) -> None:
        self.inner.admit([self._part(bucket) for bucket in buckets], combine)

    def start(self, message: Sequence[Tensor], step: int, first: int = 0) -> "Parts":
        """Memory until landed: what the inner exchange takes for the parts, and where the gather doesn't wait for the
        landing one copy of the message."""
        return self._order.begin(lambda: self._start(message, step, first), self.inner, message, step)

    def _start(self, message: Sequence[Tensor], step: int, first: int) -> "Parts":
        started = self.inner.start([self._part(m) for m in message], step, first)
        if self.coder.encodes:  # what is sent isn't what was given: every device must believe what the island said
            started.settle()
            # Cloned: the gather overwrites the message, of which a part is a view.
            self._share(message, [self._part(m).clone() for m in message])

        def gather() -> list[Tensor]:
            parts, sick = self._order.land(started, self.inside)
            mixed = [self.pool.take(m) for m in message]
            self._share(mixed, parts)
            self.inner.pool.give(parts)
            if sick is not None:
                sent = [torch.empty_like(m) for m in message]
                self._share(sent, sick.sent or [self._part(m) for m in message])
                self._take_one([*sent, *mixed], sick)
                raise Sick(str(sick), sent, mixed, sick.round)
            return mixed

        return Parts([started], gather)

    def depart(self, started: Sequence["Parts"], step: int) -> None:
        if waiting := [part for parts in started for part in parts.waiting]:
            self.inner.depart(waiting, step)

    def _share(self, wholes: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        """wholes <- every device's parts."""
        pairs = list(zip(wholes, parts, strict=True))
        # All are under way before the first is awaited.
        gathers = [self.inside.all_gather_into(w, p) for w, p in pairs if self._split(w)]
        self._waited.during(pending.wait for pending in gathers)
        for whole, part in pairs:
            if not self._split(whole):
                whole.copy_(part)

    def _take_one(self, wholes: Sequence[Tensor], sick: "SickPart") -> None:
        """What every device exchanged for itself is that of the device whose message was refused."""
        for whole in wholes:
            if not self._split(whole):
                self.inside.broadcast(whole, sick.place).wait()

    def _part(self, message: Tensor) -> Tensor:
        return message.view(self.inside.size, -1)[self.inside.rank] if self._split(message) else message

    def _split(self, message: Tensor) -> bool:
        # What can't be divided (a rule's own scalar) is exchanged whole by every device.
        return message.numel() % self.inside.size == 0

    def traffic(self) -> Traffic:
        """The inner exchange's, and the seconds waited for the other parts: `bytes_sent` are those that left the
        island."""
        return self._order.traffic(self.inner.traffic() + Traffic(wait_seconds=self._waited.seconds()))


@dataclass
class Parts(Started):
    """This device's parts of a few buckets.

    Args:
        waiting: what of them the inner exchange has started and has not left.
        finish: waits for the wholes.
    """

    waiting: Sequence[Started]
    finish: Callable[[], list[Tensor]]

    @property
    def together(self) -> bool:  # type: ignore[override]
        return any(part.together for part in self.waiting)

    def land(self) -> list[Tensor]:
        return self.finish()


class SickPart(Sick):
    """A part of this island's message was refused; all its devices know.

    Args:
        sent: what counts in the place of this device's part; nothing where it was accepted.
        place: the first device whose part it was.
    """

    def __init__(self, complaint: str, sent: Sequence[Tensor], round: int, place: int) -> None:
        super().__init__(complaint, sent, [], round)
        self.place = place


class AtLanding:
    """The gather happens where the round lands: the wait of its transport is the host's, so sooner would block."""

    def land(self, started: Started, inside: Transport) -> tuple[list[Tensor], SickPart | None]:
        """This device's parts, and whether any device's message was refused: the devices of an island are healed, or
        end, together. Collective inside."""
        try:
            parts, sick = started.land(), None
        except Sick as found:
            parts, sick = found.mixed, found
        mine = torch.tensor([-1 if sick is None else sick.round], device=parts[0].device)
        pending, rounds = inside.all_gather(mine)
        pending.wait()
        told = [int(round) for round in rounds]
        place = max(range(inside.size), key=told.__getitem__)
        if told[place] < 0:
            return parts, None
        others = f"another device of this island was refused by its neighbours in round {told[place]}; see its output"
        if sick is None:
            return parts, SickPart(others, [], told[place], place)
        return parts, SickPart(str(sick), sick.sent, told[place], place)

    def begin(self, start: Callable[[], Parts], inner: Exchange[Any], message: Sequence[Tensor], step: int) -> Parts:
        """Start it; it departs with the others."""
        return start()

    def traffic(self, counted: Traffic) -> Traffic:
        return counted


class SideStream:
    """On a second stream, as soon as it starts; the caller's stream waits for the outcome where it lands.

        caller   message |     forward, backward, update     | mixed
        aside            | send, wait, mix, gather |

    Args:
        device: a CUDA one, its transfers by NCCL.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = cuda.Stream(device)
        self._waited = DeviceStopwatch()
        self._in_flight_seconds = 0.0

    def land(self, started: Started, inside: Transport) -> tuple[list[Tensor], SickPart | None]:
        # To ask the others would make the host wait: whoever is refused ends.
        return started.land(), None

    def begin(self, start: Callable[[], Parts], inner: Exchange[Any], message: Sequence[Tensor], step: int) -> Parts:
        """Start, send and land it on this stream."""
        caller = cuda.current_stream(self._stream.device)
        self._stream.wait_stream(caller)  # for the message, and for readers of the buffers that went back to a pool
        # All that the exchanges keep (pools, a codec's estimates) is touched on this stream alone.
        with cuda.on(self._stream):
            parts = start()
            inner.depart(parts.waiting, step)
            if inner.coder.encodes:  # starting overwrites the message, which the caller reads next
                caller.wait_stream(self._stream)
            mixed = parts.land()
            done = self._stream.record_event()
        # The allocator mustn't give their memory away before this stream has read them.
        for tensor in message:
            tensor.record_stream(self._stream)
        return Parts([], self._landing(mixed, done))

    def _landing(self, mixed: list[Tensor], done: cuda.Event) -> Callable[[], list[Tensor]]:
        launched = perf_counter()

        def land() -> list[Tensor]:
            caller = cuda.current_stream(self._stream.device)
            self._waited.during([partial(caller.wait_event, done)])
            self._in_flight_seconds += perf_counter() - launched
            # Nor these before the caller has: they are this stream's.
            for tensor in mixed:
                tensor.record_stream(caller)
            return mixed

        return land

    def traffic(self, counted: Traffic) -> Traffic:
        # The waits that the exchanges counted were this stream's: hidden. Only the caller's cost time.
        return replace(counted, wait_seconds=self._waited.seconds(), in_flight_seconds=self._in_flight_seconds)
