"""Peer-to-peer exchange: sends to this worker's targets, receives from its sources: mixed_i = sum_j w_ij sent_j.

Messages may be encoded. An all-reduce in cliques (`assembly`) and `W @ message` (`simulation`) give the same numbers
up to rounding."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from lightning_decentral.gossip.compute.combine.combine import Combine
from lightning_decentral.gossip.compute.error_feedback import coder_of
from lightning_decentral.gossip.compute.link import Buffers, Coder
from lightning_decentral.gossip.compute.mixing import Verdicts, correct_, correct_and_state_, difference, mix, refuse
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import Neighbours, Weights, neighbours
from lightning_decentral.gossip.wire.exchange import HEADER, Copied, EarlyArrival, Exchange, Landed, Traffic
from lightning_decentral.shared.compute.buckets import Pool
from lightning_decentral.shared.compute.codec.codec import Codec, Plain
from lightning_decentral.shared.compute.device import stopwatch
from lightning_decentral.shared.compute.health import judged, scale, scales_in, stated
from lightning_decentral.shared.wire.transport import Message, Transport

E = TypeVar("E", bound=EarlyArrival)


@dataclass
class Arrivals(Exchange[E]):
    """Base of exchanges that send messages to certain workers and receive theirs, as `EarlyArrival`."""

    topology: Topology
    weights: Weights
    transport: Transport  # sends the messages, of this exchange alone
    device: torch.device
    codec: Codec = Plain()  # noqa: RUF009 - a frozen value, for every message
    pool: Pool = field(default_factory=Pool)  # shared by all exchanges whose rounds alternate

    def __post_init__(self) -> None:
        plan = self.topology, self.weights, self.transport.rank, self.transport.size
        self._period, self._at = self.topology.period(self.transport.size), cache(partial(neighbours, *plan))
        self.verdicts = Verdicts(self.transport.rank, repr(self.codec) if self.codec.encodes else "")
        self.waited, self._bytes_sent, self._elements = stopwatch(self.device), 0, 0

    def neighbours(self, step: int) -> Neighbours:
        return self._at(step % self._period)

    def depart(self, launched: Sequence[E], step: int) -> None:
        sends, receives = [message.sends() for message in launched], [message.receives() for message in launched]
        # All buckets at once: on a GPU in one launch.
        outgoing, incoming = self.transport.exchange([*chain(*sends)], [*chain(*receives)])
        self._bytes_sent += bytes_of(chain(*sends))
        for message, sent, received in zip(launched, sends, receives, strict=True):
            message.outgoing, outgoing = outgoing[: len(sent)], outgoing[len(sent) :]
            message.incoming, incoming = incoming[: len(received)], incoming[len(received) :]

    def traffic(self) -> Traffic:
        waited, refused = self.waited.seconds(), self.verdicts.refused
        return Traffic(bytes_sent=self._bytes_sent, wait_seconds=waited, refused=refused)


def bytes_of(sends: Iterable[Message]) -> int:
    return sum(m.tensor.numel() * m.tensor.element_size() for m in sends)


def messages(by_worker: Mapping[int, Sequence[Tensor]]) -> list[Message]:
    """Make the transport's messages, numbered for each worker as on both ends."""
    return [Message(j, tensor, tag) for j, tensors in by_worker.items() for tag, tensor in enumerate(tensors)]


@dataclass
class PeerMessage(EarlyArrival):
    """Message in flight: one bucket to and from the neighbours of one step."""

    exchange: "PeerExchange"
    step: int
    place: int
    row: Mapping[int, float]  # {j: w_ij} of the mixture, this worker included
    sent: Tensor  # [elements]
    headers: Tensor  # int64 [1 + sources, HEADER]: this worker's, then each source's
    packets: Mapping[int, Buffers]  # {target: payload}
    buffers: Mapping[int, Buffers]  # {source: where its payload is received}
    corrects: bool = False
    received: Mapping[int, Tensor] | None = None  # {source: its message, decoded}
    sane: Tensor = field(init=False)  # bool [1 + sources]: whether the own message is sound, then each source's

    def sends(self) -> list[Message]:
        return messages({k: [self.headers[0], *payload] for k, payload in self.packets.items()})

    def receives(self) -> list[Message]:
        rows = zip(self.buffers.items(), self.headers[1:], strict=True)
        return messages({j: [row, *payload] for (j, payload), row in rows})

    def arrive(self) -> list[Tensor]:
        self.received, self.sane = self.exchange.receive(self)
        return [self.headers, self.sane, *self.received.values()]

    def land(self, judged: bool = False) -> Tensor:
        exchange, own, received = self.exchange, self.sent, self._arrived()
        if not judged:
            # A worker that took another number of steps would silently pair rounds wrongly.
            exchange.verdicts.judge(self.step, [exchange.transport.rank, *received], self.headers, self.sane)
        sane, complaint = self.sane[1:], exchange.verdicts.complaint
        instead = own
        if complaint:
            # sum_j w_ij sent_j / sum_j w_ij over the sources j whose messages are sound; the own message if none is.
            # Rare, so that the host may wait for the device's verdicts.
            sound = [j for j, healthy in zip(received, sane, strict=True) if bool(healthy)]
            total = sum(self.row[j] for j in sound)
            means = [received[j] * (self.row[j] / total) for j in sound]
            own = instead = exchange.stand_in(torch.stack(means).sum(dim=0) if sound else own)
        elif exchange.device.type != "cuda" and not bool(sane.all()):
            # A GPU isn't asked: there the own message replaces a refused one. A rule for which that's wrong ends
            # together with the sender, whose state is poisoned by then.
            instead = exchange.stand_in(own)
        for tensor, healthy in zip(received.values(), sane, strict=True):
            refuse(tensor, instead, healthy)
        # w_ii sent_i + sum_j w_ij received_j, in the received buffers; always in the same order, so that a resumed run
        # rounds alike.
        mixed, *others = received.values() if received else [exchange.pool.take(own).copy_(own)]
        if received:
            mix(own, [mixed, *others], [self.row[exchange.transport.rank], *(self.row[j] for j in received)])
        exchange.pool.give(others)
        self.release()
        if complaint:
            exchange.verdicts.refuse_own(own, mixed)
        return mixed

    def correct(self, x: Tensor, rate: float, copied: Copied | None = None) -> None:
        """x <- x + rate sum_j w_ij (received_j - sent) over accepted messages."""
        received = self._arrived()
        terms = self._terms(received)
        if copied is None:
            correct_(x, *terms, rate)
        else:
            assert copied.headers is not None
            correct_and_state_(copied.message, copied.headers[0], x, *terms, rate, copied.step, copied.elements)
        self.release()
        self.exchange.pool.give(received.values())

    def keep(self, corrects: bool) -> Landed:
        if not (corrects and self.corrects):
            return super().keep(corrects)
        received = self._arrived()
        added = difference(*self._terms(received))  # what `correct` would add
        self.release()
        self.exchange.pool.give(received.values())
        return Landed(self.sent, added, corrects=True)

    def _arrived(self) -> Mapping[int, Tensor]:
        if self.received is None:
            self.arrive()
        assert self.received is not None
        return self.received

    def _terms(self, received: Mapping[int, Tensor]) -> tuple[Tensor, list[Tensor], list[float], Tensor]:
        """Terms of a correction: own message, received messages, weights, verdicts; raises `Sick` for a bad own one."""
        verdicts = self.exchange.verdicts
        verdicts.judge(self.step, [self.exchange.transport.rank, *received], self.headers, self.sane)
        if verdicts.complaint:
            self.land(judged=True)  # mixes what heals this worker, and raises
        return self.sent, [*received.values()], [self.row[j] for j in received], self.sane

    def release(self) -> None:
        """Wait until the messages have been sent, and return their buffers to the pool."""
        for pending in self.outgoing:
            pending.wait()
        if self.exchange.coder.encodes:  # else the message itself was sent
            # Each payload once: the targets of an audience share it.
            self.exchange.pool.give(chain(*{id(payload): payload for payload in self.packets.values()}.values()))


@dataclass
class PeerExchange(Arrivals[PeerMessage]):
    """Sends this worker's buckets to its targets, receives from its sources, and mixes accepted messages. Every message
    is preceded by a header (round, elements of all buckets); a header of another round is an error. A message with NaN,
    infinity or numbers far too large next to the others is refused and counted: the receiver's own parameters get its
    weight."""

    coder: Coder = field(init=False)
    _combine: Combine | None = field(default=None, init=False)
    made: ClassVar[type[PeerMessage]] = PeerMessage

    def __post_init__(self) -> None:
        super().__post_init__()
        self.coder = coder_of(self.codec, self.topology, self.transport.rank, self.transport.size, self.pool)

    def admit(self, buckets: Sequence[Tensor], combine: Combine) -> None:
        # Both ends of a link begin with the same estimate: worker 0's parameters, which are broadcast.
        references = [bucket.clone() for bucket in buckets] if self.codec.remembers else buckets
        for reference in references if self.codec.remembers else []:
            self.transport.broadcast(reference).wait()
        self._combine = combine
        self.coder.admit(references, combine)
        self._elements += sum(bucket.numel() for bucket in buckets)

    def stand_in(self, message: Tensor) -> Tensor:
        """Replacement of a refused message, by the rule's `Recovery.stand_in`."""
        assert self._combine is not None
        return self._combine.recovery.stand_in(message)

    def copied(self, x: Tensor, step: int, place: int) -> Copied:
        rows = 1 + len(self.neighbours(step).sources)
        headers = torch.empty(rows, HEADER, dtype=torch.int64, device=self.device)
        return Copied(self.pool.take(x), headers, step, self._elements)

    def launch(self, message: Tensor, step: int, place: int, copied: Copied | None = None) -> PeerMessage:
        """Launch a message. Memory until mixed: one copy of the message for each source."""
        at, cuda = self.neighbours(step), self.device.type == "cuda"
        if cuda and copied is None and not self.coder.encodes:
            copied = self.copied(message, step, place).of(message)  # the copy and its header, in one pass
        sent = copied.message if copied else self.pool.take(message).copy_(message)
        headers = copied.headers if copied and not self.coder.encodes else None
        packets = self.coder.encode(sent, at.targets, step, place)
        buffers = self.coder.buffers(at.sources, sent, place)
        if headers is None:
            headers = torch.empty(1 + len(buffers), HEADER, dtype=torch.int64, device=self.device)
            # The scale of the decoded message, which may overflow; now, while the message is in the processor's cache.
            headers[0].copy_(stated([step, self._elements], [sent], self.device))
        # On the CPU a thread mixes, during training.
        return self.made(self, step, place, at.row, sent, headers, packets, buffers, cuda and bool(buffers))

    def receive(self, message: PeerMessage) -> tuple[Mapping[int, Tensor], Tensor]:
        """Wait for the messages to this worker, decode and check them, on the current stream. Returns ({source: its
        message}, bool [1 + sources]: whether each is sound, the own message first)."""
        self.waited.during(pending.wait for pending in message.incoming)
        received = self._decoded(message)
        if self.coder.encodes:  # decoded by this worker, perhaps from another estimate than the sender's
            for row, tensor in zip(message.headers[1:], received.values(), strict=True):
                scales_in(row).copy_(scale([tensor]))
        sane = judged(message.headers)
        if self.codec.remembers:  # before they are mixed, which is done in place
            self.coder.remember(received, sane[1:], message.place)
        return received, sane

    def _decoded(self, message: PeerMessage) -> Mapping[int, Tensor]:  # elastic rounds leave out lost messages
        return self.coder.decode(message.buffers, message.sent, message.place)
