"""One worker of several devices with equal parameters: each exchanges a part, then they share what they heard."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

import torch
from torch import Tensor

from lightning_decentral.gossip.compute.combine.combine import Combine
from lightning_decentral.gossip.wire.exchange import Around, Land, Traffic
from lightning_decentral.shared.compute.buckets import Matrix, Pool
from lightning_decentral.shared.compute.device import DeviceStopwatch, stopwatch
from lightning_decentral.shared.wire.transport import Transport


@dataclass
class GatherExchange(Around):
    """mixed[p] = sum_j w_ij sent_j[p] for this device's part p; then every device gets every part.

    A bucket of n elements has L equal parts for L devices: every byte of a message crosses the network card of the
    island's node once. A tensor that can't be divided (a rule's own scalar) is exchanged whole by every device.

    By NCCL the gather, too, is hidden behind the next step, on a stream of its own; by gloo it waits for the landing.

    Args:
        inner: exchanges between the devices at this one's place in every island.
        inside: the devices of this island, in order of place, for this alone.
        encoded: what is sent isn't what was given: the devices share what was made of their parts.

    Source: the two-level scheme of the parameters' exchange, Wang et al. 2410.11998, section 4.
    """

    inside: Transport
    device: torch.device
    encoded: bool = False
    pool: Pool = field(default_factory=Pool, init=False)

    def __post_init__(self) -> None:
        self._waited = stopwatch(self.device)
        self._aside = aside(self.inside, self.device)

    def admit(self, buckets: Sequence[Tensor], matrices: Sequence[Sequence[Matrix]], combine: Combine) -> None:
        """This device's parts. No codec sees matrices: a part cuts through them."""
        self.inner.admit([self._part(bucket) for bucket in buckets], [()] * len(buckets), combine)

    def copies_sent(self, step: int) -> float:
        """This device's part of the island's."""
        return self.inner.copies_sent(step) / self.inside.size

    def start(self, message: Sequence[Tensor], step: int, first: int = 0) -> Land:
        """This device's part. Memory until landed: what the inner exchange takes for the parts, and where the gather
        doesn't wait for the landing one copy of the message."""
        return self._aside.begin(lambda: self._start(message, step, first), self.inner.depart, message, self.encoded)

    def _start(self, message: Sequence[Tensor], step: int, first: int) -> Land:
        inner_land = self.inner.start([self._part(m) for m in message], step, first)
        if self.encoded:  # every device must believe what the island said
            self.inner.settle()
            self._share(message, [self._part(m).clone() for m in message])

        def land() -> list[Tensor]:
            parts = inner_land()
            mixed = [self.pool.take(m) for m in message]
            self._share(mixed, parts)
            self.inner.pool.give(parts)
            return mixed

        return land

    def _share(self, wholes: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        """wholes <- every device's parts."""
        self._waited.start()
        pairs = list(zip(wholes, parts, strict=True))
        for pending in [self.inside.all_gather_into(w, p) for w, p in pairs if self._split(w)]:
            pending.wait()
        self._waited.stop()
        for whole, part in pairs:
            if not self._split(whole):
                whole.copy_(part)

    def message_bytes(self, message: Sequence[Tensor]) -> int:
        """Of all devices' parts together, as if each had what this one has."""
        return sum(
            self.inner.message_bytes([self._part(m)]) * (self.inside.size if self._split(m) else 1) for m in message
        )

    def _split(self, message: Tensor) -> bool:
        return message.numel() % self.inside.size == 0

    def _part(self, message: Tensor) -> Tensor:
        return message.view(self.inside.size, -1)[self.inside.rank] if self._split(message) else message

    def traffic(self) -> Traffic:
        """The inner exchange's, and the seconds waited for the other parts: `bytes_sent` are those that left the
        island."""
        return self._aside.traffic(self.inner.traffic() + Traffic(wait_seconds=self._waited.seconds()))


Start = Callable[[], Land]


class AtLanding:
    """Where it lands, for transports whose wait is the host's: waiting sooner would block."""

    def begin(self, start: Start, depart: Callable[[], None], message: Sequence[Tensor], encoded: bool) -> Land:
        """Start it; it departs with the others."""
        return start()

    def traffic(self, counted: Traffic) -> Traffic:
        """As counted."""
        return counted


class Aside:
    """On a second stream, as soon as it starts; the caller's stream waits for the outcome where it lands.

        caller   message |     forward, backward, update     | mixed
        aside            | send, wait, mix, gather |

    All that the exchanges keep (their pools, a codec's estimates) is touched on this stream alone.

    Args:
        device: a CUDA one, its transfers by NCCL.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._waited = DeviceStopwatch()
        self._in_flight_seconds = 0.0

    def begin(self, start: Start, depart: Callable[[], None], message: Sequence[Tensor], encoded: bool) -> Land:
        """Start, send and land it on this stream.

        Args:
            encoded: starting overwrites the message, which the caller reads next.
        """
        caller = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(caller)  # for the message, and for readers of the buffers that went back to a pool
        with torch.cuda.stream(self._stream):
            land = start()
            depart()
            if encoded:
                caller.wait_stream(self._stream)
            mixed = land()
            done = self._stream.record_event()
        for tensor in message:
            tensor.record_stream(self._stream)
        return self._landing(mixed, done)

    def _landing(self, mixed: list[Tensor], done: torch.cuda.Event) -> Land:
        launched = perf_counter()

        def land() -> list[Tensor]:
            caller = torch.cuda.current_stream(self._stream.device)
            self._waited.start()
            caller.wait_event(done)
            self._waited.stop()
            self._in_flight_seconds += perf_counter() - launched
            for tensor in mixed:
                tensor.record_stream(caller)
            return mixed

        return land

    def traffic(self, counted: Traffic) -> Traffic:
        """With the seconds that the caller's stream waited: this one's are hidden."""
        return replace(counted, wait_seconds=self._waited.seconds(), in_flight_seconds=self._in_flight_seconds)


def aside(transport: Transport, device: torch.device) -> AtLanding | Aside:
    """What rounds over such a transport allow."""
    return Aside(device) if transport.queued else AtLanding()
