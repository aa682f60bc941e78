"""Peer-to-peer exchange: sends to this worker's targets, receives from its sources: mixed_i = sum_j w_ij sent_j.

Messages may be encoded. An all-reduce in cliques (`clique`) and `W @ message` (`simulation`) give the same numbers up
to rounding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from time import perf_counter

import torch
from torch import Tensor

from lightning_decentral.gossip.compute.combine.combine import Combine
from lightning_decentral.gossip.compute.correction import correct_, correct_and_state_, difference, mix
from lightning_decentral.gossip.compute.error_feedback import coder_of
from lightning_decentral.gossip.compute.integrity import Verdicts, refuse
from lightning_decentral.gossip.compute.link import Buffers, Coder
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import Neighbours, Weights, neighbours
from lightning_decentral.gossip.wire.exchange import (
    HEADER,
    Arrivals,
    Arriving,
    Copied,
    Landed,
    Tally,
    Traffic,
)
from lightning_decentral.shared.compute.buckets import Pool
from lightning_decentral.shared.compute.codec.codec import Codec
from lightning_decentral.shared.compute.codec.deterministic import Plain
from lightning_decentral.shared.compute.health import judged, scale, scales_in, stated
from lightning_decentral.shared.wire.pending import Pending
from lightning_decentral.shared.wire.transport import Message, Transport

Arrived = tuple[Mapping[int, Buffers], Tensor]
"""({source: its message}, what is sound: this worker's own message, then each source's)"""


@dataclass
class PeerMessages(Arriving):
    """Buckets on their way to and from the neighbours of one step."""

    exchange: "PeerExchange"
    step: int
    first: int
    message: Sequence[Tensor]
    said: Tensor
    packets: Mapping[int, Buffers]
    buffers: Mapping[int, Buffers]
    corrects: bool = False
    arrived: Arrived | None = None
    outgoing: Sequence[Pending] = ()
    incoming: Sequence[Pending] = ()
    departed: float = 0.0

    @property
    def header(self) -> Tensor:
        """Header of this worker's message."""
        return self.said[0]

    @property
    def headers(self) -> dict[int, Tensor]:
        """{source: its header}"""
        return dict(zip(self.buffers, self.said[1:], strict=True))

    def sends(self) -> list[Message]:
        """A header, then the payload."""
        return [Message(k, t, tag) for k, sent in self.packets.items() for tag, t in enumerate([self.header, *sent])]

    def receives(self) -> list[Message]:
        # In the order of the senders' `sends`: NCCL pairs by order, gloo by tag.
        headers = self.headers
        return [Message(j, t, tag) for j, p in self.buffers.items() for tag, t in enumerate([headers[j], *p])]

    @property
    def correction(self) -> "PeerMessages | None":
        return self if self.corrects else None

    def land(self) -> list[Tensor]:
        return self.exchange.landed(self)

    def correct(self, x: Tensor, rate: float, copied: Copied | None = None) -> None:
        self.exchange.correct(self, x, rate, copied)

    def keep(self) -> Landed:
        return self.exchange.keep(self)

    def arrive(self) -> None:
        self.arrived = self.exchange.arrived(self)

    def belongings(self) -> list[Tensor]:
        assert self.arrived is not None
        heard, sane = self.arrived
        return [self.said, sane, *(tensor for tensors in heard.values() for tensor in tensors)]


@dataclass
class PeerExchange(Arrivals[PeerMessages]):
    """Send this worker's buckets to its targets, receive from its sources, and mix what is accepted.

    Every message is preceded by a header (round, elements of all buckets), and that of another round is an error. A
    message with NaN, infinity or numbers absurd next to the others' is refused: its weight falls to the receiver's own
    parameters, and it is counted.

    Args:
        transport: of this exchange alone.
        codec: of every message.
        pool: that its buffers come from; one for all exchanges whose rounds alternate.
    """

    topology: Topology
    weights: Weights
    transport: Transport
    device: torch.device
    codec: Codec = Plain()  # noqa: RUF009 - a frozen value
    pool: Pool = field(default_factory=Pool)
    coder: Coder = field(init=False)
    _combine: Combine | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        rank, size = self.transport.rank, self.transport.size
        self.coder = coder_of(self.codec, self.topology, rank, size, self.pool)
        self._period, self._phases = self.topology.period(size), dict[int, Neighbours]()
        self._verdicts = Verdicts(rank, repr(self.codec) if self.codec.encodes else "")
        self._tally = Tally(self.device)
        self._elements = 0

    def neighbours(self, step: int) -> Neighbours:
        phase = step % self._period
        if phase not in self._phases:
            plan = self.topology, self.weights, self.transport.rank, self.transport.size
            self._phases[phase] = neighbours(*plan, phase)
        return self._phases[phase]

    def admit(self, buckets: Sequence[Tensor], combine: Combine) -> None:
        # Both ends of a link begin with one estimate: worker 0's parameters, by one broadcast.
        references = [bucket.clone() for bucket in buckets] if self.coder.estimates else buckets
        for reference in references if self.coder.estimates else []:
            self.transport.broadcast(reference).wait()
        self._combine = combine
        self.coder.admit(references, combine)
        self._elements += sum(bucket.numel() for bucket in buckets)

    def start(self, message: Sequence[Tensor], step: int, first: int = 0) -> PeerMessages:
        """Memory until landed: one copy of the message for each source."""
        at = self.neighbours(step)
        packets = self.coder.encode(message, at.heard_by, step, first)
        buffers = self.coder.buffers(at.sources, message, first)
        said = torch.empty(1 + len(buffers), HEADER, dtype=torch.int64, device=self.device)
        # Of what receivers decode, which may overflow; now, while it is in the processor's cache.
        said[0].copy_(stated([step, self._elements], message, self.device))
        # On the host a thread mixes, during the training.
        corrects = self.device.type == "cuda" and len(message) == 1 and bool(buffers)
        return PeerMessages(self, step, first, message, said, packets, buffers, corrects)

    def copied(self, x: Tensor, step: int, place: int) -> Copied:
        rows = 1 + len(self.neighbours(step).sources)
        said = torch.empty(rows, HEADER, dtype=torch.int64, device=self.device)
        return Copied(self.pool.take(x), said, step, self._elements)

    def launch(
        self, message: Tensor, step: int, place: int, copied: Copied | None = None
    ) -> tuple[Tensor, PeerMessages]:
        if self.device.type != "cuda" or self.coder.encodes:
            return super().launch(message, step, place, copied)
        # The copy and its header, in one pass.
        copied = copied or self.copied(message, step, place).of(message)
        at, sent = self.neighbours(step), copied.message
        packets = self.coder.encode([sent], at.heard_by, step, place)
        buffers = self.coder.buffers(at.sources, [sent], place)
        return sent, PeerMessages(self, step, place, [sent], copied.said, packets, buffers, bool(buffers))

    def depart(self, started: Sequence[PeerMessages], step: int) -> None:
        sends, receives = [part.sends() for part in started], [part.receives() for part in started]
        # All buckets at once: on a device in one launch.
        outgoing, incoming = self.transport.exchange([*chain(*sends)], [*chain(*receives)])
        self._tally.bytes_sent += sum(m.tensor.numel() * m.tensor.element_size() for m in chain(*sends))
        for part, sent, received in zip(started, sends, receives, strict=True):
            part.departed = perf_counter()
            part.outgoing, outgoing = outgoing[: len(sent)], outgoing[len(sent) :]
            part.incoming, incoming = incoming[: len(received)], incoming[len(received) :]

    def correct(self, part: PeerMessages, x: Tensor, rate: float, copied: Copied | None) -> None:
        """x <- x + rate sum_j w_ij (heard_j - sent) over what is accepted."""
        heard, sane = self._accepted(part)
        terms = self._terms(part, heard, sane)
        if copied:
            correct_and_state_(copied.message, copied.said[0], x, *terms, rate, copied.step, copied.elements)
        else:
            correct_(x, *terms, rate)
        self._left(part)
        self.pool.give(tensor for tensors in heard.values() for tensor in tensors)

    def keep(self, part: PeerMessages) -> Landed:
        """Keep the difference that `correct` would add."""
        heard, sane = self._accepted(part)
        added = difference(*self._terms(part, heard, sane))
        self._left(part)
        self.pool.give(tensor for tensors in heard.values() for tensor in tensors)
        return Landed([added], corrects=True)

    def _terms(
        self, part: PeerMessages, heard: Mapping[int, Buffers], sane: Tensor
    ) -> tuple[Tensor, list[Tensor], list[float], Tensor]:
        """Terms of a correction: own message, received ones, weights, which are sound; `Sick` where the own isn't."""
        if self._verdicts.complaint:
            self._mixed(part, heard, sane)
        row = self._row(part)
        return part.message[0], [tensors[0] for tensors in heard.values()], [row[j] for j in heard], sane

    def landed(self, part: PeerMessages) -> list[Tensor]:
        return self._mixed(part, *self._accepted(part))

    def _accepted(self, part: PeerMessages) -> Arrived:
        heard, sane = part.arrived or self.arrived(part)
        # A worker that took another number of steps would pair rounds wrongly without a sign.
        self._verdicts.hear(part.step, [self.transport.rank, *heard], part.said, sane)
        return heard, sane

    def arrived(self, part: PeerMessages) -> Arrived:
        """Wait for what was sent to this worker, decode and judge it; on the current stream."""
        self._tally.land(part.incoming, part.departed, part.first)
        heard = self._heard(part)
        for j in heard if self.coder.encodes else ():  # decoded here, perhaps from another estimate
            scales_in(part.headers[j]).copy_(scale(heard[j]))
        sane = judged(part.said)
        if self.coder.estimates:  # before they are mixed, which is done in place
            self.coder.remember(heard, dict(zip(heard, sane[1:], strict=True)), part.first)
        return heard, sane

    def _mixed(self, part: PeerMessages, heard: Mapping[int, Buffers], sane: Tensor) -> list[Tensor]:
        healthy = dict(zip(heard, sane[1:], strict=True))
        sent: Sequence[Tensor] = part.message
        instead = sent
        if self._verdicts.complaint:
            sent = instead = self._stand_ins(self._mean_of_sound(self._row(part), sent, heard, healthy))
        elif self.device.type != "cuda" and not all(map(bool, healthy.values())):
            # A device isn't asked: there the own message stands in, and a rule for which that's wrong ends when the
            # sender does, whose state the message has spoiled by then.
            instead = self._stand_ins(sent)
        for j, tensors in heard.items():
            refuse(tensors, instead, healthy[j])
        mixed = self._mix(self._row(part), sent, heard)
        self._left(part)
        if self._verdicts.complaint:
            self._verdicts.refuse_own(sent, mixed)
        return mixed

    def _row(self, part: PeerMessages) -> Mapping[int, float]:
        """{j: w_ij} of what is mixed, this worker included."""
        return self.neighbours(part.step).row

    def _left(self, part: PeerMessages) -> None:
        """Wait until what was sent has left."""
        for pending in part.outgoing:
            pending.wait()
        self.coder.release(part.packets)

    def _heard(self, part: PeerMessages) -> dict[int, Buffers]:
        return self.coder.decode(part.buffers, part.message, part.first)

    def _stand_ins(self, messages: Sequence[Tensor]) -> list[Tensor]:
        assert self._combine is not None
        return [self._combine.recovery.stand_in(message) for message in messages]

    def _mean_of_sound(
        self,
        row: Mapping[int, float],
        message: Sequence[Tensor],
        heard: Mapping[int, Sequence[Tensor]],
        healthy: Mapping[int, Tensor],
    ) -> Sequence[Tensor]:
        """sum_j w_ij sent_j / sum_j w_ij over the sources j whose messages are sound; the own one where none is."""
        # Seldom, so that the host may wait for the device's verdicts.
        sound = {j: tensors for j, tensors in heard.items() if bool(healthy[j])}
        if not sound:
            return message
        total = sum(row[j] for j in sound)
        shares = [[t * (row[j] / total) for t in tensors] for j, tensors in sound.items()]
        return [torch.stack(parts).sum(dim=0) for parts in zip(*shares, strict=True)]

    def _mix(
        self, row: Mapping[int, float], message: Sequence[Tensor], heard: Mapping[int, Sequence[Tensor]]
    ) -> list[Tensor]:
        """w_ii sent_i + sum_j w_ij sent_j, in the received buffers."""
        if not heard:
            return [self.pool.take(m).copy_(m) for m in message]
        # In one order always, so that a resumed run rounds alike.
        weights = [row[self.transport.rank], *(row[j] for j in heard)]
        (_, first), *others = heard.items()
        for place, (total, own) in enumerate(zip(first, message, strict=True)):
            mix(own, [total, *(tensors[place] for _, tensors in others)], weights)
        self.pool.give([tensor for _, tensors in others for tensor in tensors])
        return list(first)

    def traffic(self) -> Traffic:
        return self._tally.traffic(self._verdicts.refused)
