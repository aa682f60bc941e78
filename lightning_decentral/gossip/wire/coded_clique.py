"""All-reduce exchange of codes: all workers' mean by parts with owners, for rules that bear one which is rounded, too.

    launch      encode each part for its owner      depart    send it there, and a header to all
    land        wait, decode, add up, encode the own part's mean, send it to all, wait, decode

The arithmetic, and what an owner keeps of what it rounded away, is `shared.compute.codec.coded_parts`'.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from time import perf_counter

import torch
from torch import Tensor

from lightning_decentral.gossip.compute.coded_mean import CodedMean
from lightning_decentral.gossip.compute.combine.combine import Combine
from lightning_decentral.gossip.compute.error_feedback import real_numbers
from lightning_decentral.gossip.compute.integrity import Verdicts, refuse
from lightning_decentral.gossip.compute.link import Buffers, Everyone
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import Entries, Neighbours, Weights, entries, neighbours
from lightning_decentral.gossip.wire.exchange import (
    HEADER,
    Arrivals,
    Arriving,
    Exchange,
    Started,
    Tally,
    Traffic,
)
from lightning_decentral.shared.compute.buckets import Pool
from lightning_decentral.shared.compute.codec.codec import Codec
from lightning_decentral.shared.compute.codec.coded_parts import CodedParts
from lightning_decentral.shared.compute.health import judged, stated
from lightning_decentral.shared.wire.pending import Pending
from lightning_decentral.shared.wire.transport import Message, Transport


@dataclass
class CodedMessages(Arriving):
    """Buckets on their way to the owners of their parts, and the owners' means on their way back."""

    exchange: "CodedCliqueExchange"
    step: int
    first: int
    message: Sequence[Tensor]
    said: Tensor
    codes: Sequence[Mapping[int, Buffers]]
    buffers: Sequence[Mapping[int, Buffers]]
    together = True
    arrived: tuple[list[Tensor], Tensor] | None = None
    outgoing: Sequence[Pending] = ()
    incoming: Sequence[Pending] = ()
    departed: float = 0.0

    def land(self) -> list[Tensor]:
        return self.exchange.landed(self)

    def arrive(self) -> None:
        self.arrived = self.exchange.arrived(self)

    def belongings(self) -> list[Tensor]:
        assert self.arrived is not None
        mixed, sane = self.arrived
        return [self.said, sane, *mixed]


@dataclass
class CodedCliqueExchange(Arrivals[CodedMessages]):
    """mixed = Q((1/n) sum_j sent_j + f), the same bits on all, where all receive from all with equal weights.

    A message with NaN, infinity or absurd numbers counts as zero, for every owner alike, and is counted.

    Args:
        transport: carries codes to their owners, for this alone.
        back: carries the owners' codes, for this alone.
        codec: without estimates.
    """

    topology: Topology
    weights: Weights
    transport: Transport
    back: Transport
    device: torch.device
    codec: Codec
    pool: Pool = field(default_factory=Pool)
    coder: CodedMean = field(init=False)

    def __post_init__(self) -> None:
        rank, size = self.transport.rank, self.transport.size
        self._parts = CodedParts(self.codec, rank, size, self.pool)
        self.coder = CodedMean(self._parts)
        self._period, self._others = self.topology.period(size), [j for j in range(size) if j != rank]
        self._at = cache(partial(neighbours, self.topology, self.weights, rank, size))
        self._verdicts, self._tally = Verdicts(rank, repr(self.codec)), Tally(self.device)
        self._elements, self._sent_back = 0, 0

    def neighbours(self, step: int) -> Neighbours:
        return self._at(step % self._period)

    def admit(self, buckets: Sequence[Tensor], combine: Combine) -> None:
        self.coder.admit(buckets)
        self._elements += sum(bucket.numel() for bucket in buckets)

    def start(self, message: Sequence[Tensor], step: int, first: int = 0) -> CodedMessages:
        """Memory until landed: the codes of one message, and a worker's part of it from each other worker."""
        codes = self.coder.encode(message, step, first)
        said = torch.empty(self._parts.size, HEADER, dtype=torch.int64, device=self.device)
        # Of what was sent, which a codec may have made overflow: by this all judge it alike, whatever part they own.
        said[0].copy_(stated([step, self._elements], message, self.device))
        buffers = [self._parts.from_others(real_numbers(m)) for m in message]
        return CodedMessages(self, step, first, message, said, codes, buffers)

    def depart(self, started: Sequence[CodedMessages], step: int) -> None:
        sends, receives = [self._sends(part) for part in started], [self._receives(part) for part in started]
        outgoing, incoming = self.transport.exchange([*chain(*sends)], [*chain(*receives)])
        self._tally.bytes_sent += bytes_of(chain(*sends))
        for part, sent, received in zip(started, sends, receives, strict=True):
            part.departed = perf_counter()
            part.outgoing, outgoing = outgoing[: len(sent)], outgoing[len(sent) :]
            part.incoming, incoming = incoming[: len(received)], incoming[len(received) :]

    def _sends(self, part: CodedMessages) -> list[Message]:
        """Messages to each other worker: a header, then the codes of what it owns."""
        return messages({j: [part.said[0], *_codes(part.codes, j)] for j in self._others})

    def _receives(self, part: CodedMessages) -> list[Message]:
        headers = dict(zip(self._others, part.said[1:], strict=True))
        return messages({j: [headers[j], *_codes(part.buffers, j)] for j in self._others})

    def landed(self, part: CodedMessages) -> list[Tensor]:
        mixed, sane = part.arrived or self.arrived(part)
        self._verdicts.hear(part.step, [self.transport.rank, *self._others], part.said, sane)
        if self._verdicts.complaint:  # seldom, so that the host may wait for the device's verdict
            self._verdicts.refuse_own([torch.zeros_like(m) for m in part.message], mixed, late=bool(sane[0]))
        return mixed

    def arrived(self, part: CodedMessages) -> tuple[list[Tensor], Tensor]:
        """(the mean of all, whose message is sound: this worker's own, then each other's); on the current stream."""
        self._tally.land(part.incoming, part.departed, part.first)
        sane = judged(part.said)
        means = [self._mean(part, place, sane) for place in range(len(part.message))]
        owned = self.coder.owned[part.first :]
        codes = [
            self._parts.reduced(mean, f, part.step, place)
            for place, (mean, f) in enumerate(zip(means, owned, strict=False), part.first)
        ]
        self._left(part)
        mixed = [self.pool.take(m) for m in part.message]
        self._gathered(part, mixed, means, codes)
        self.pool.give(means)
        return mixed, sane

    def _mean(self, part: CodedMessages, place: int, sane: Tensor) -> Tensor:
        """(1/n) sum_j sent_j of the own part, of what is sound, in one order always."""
        own = self._parts.of(self.transport.rank, real_numbers(part.message[place]))
        mean, decoded = self.pool.take(own).copy_(own), self.pool.take(own)
        # A device isn't asked.
        nothing = torch.zeros_like(own) if self.device.type == "cuda" or not bool(sane.all()) else own
        refuse([mean], [nothing], sane[0])
        mean.mul_(self._parts.share)
        for healthy, codes in zip(sane[1:], (part.buffers[place].get(j) for j in self._others), strict=True):
            if codes is not None:
                self._parts.decode(codes, decoded)
                refuse([decoded], [nothing], healthy)
                mean.add_(decoded, alpha=self._parts.share)
        self.pool.give([decoded])
        return mean

    def _gathered(
        self, part: CodedMessages, mixed: Sequence[Tensor], means: Sequence[Tensor], codes: Sequence[Buffers]
    ) -> None:
        """mixed <- the means of all parts: the own ones, and the others' of their codes."""
        wholes = [real_numbers(m) for m in mixed]
        buffers = [self._parts.from_owners(whole) for whole in wholes]
        sends = messages({j: [*chain(*codes)] for j in self._others})
        receives = messages({j: _codes(buffers, j) for j in self._others})
        outgoing, incoming = self.back.exchange(sends, receives)
        self._sent_back += bytes_of(sends)  # counted without what leaves meanwhile, on another thread
        self._tally.wait(incoming)
        for whole, own, heard in zip(wholes, means, buffers, strict=True):
            self._parts.of(self.transport.rank, whole).copy_(own)
            for owner, came in heard.items():
                self._parts.decode(came, self._parts.of(owner, whole))
        for pending in outgoing:
            pending.wait()
        self.pool.give([*chain(*codes), *(code for row in buffers for came in row.values() for code in came)])

    def _left(self, part: CodedMessages) -> None:
        """Wait until what was sent has left."""
        for pending in part.outgoing:
            pending.wait()
        rows = (*part.codes, *part.buffers)
        self.pool.give(code for row in rows for codes in row.values() for code in codes)

    def traffic(self) -> Traffic:
        return self._tally.traffic(self._verdicts.refused) + Traffic(bytes_sent=self._sent_back)


def _codes(rows: Sequence[Mapping[int, Buffers]], worker: int) -> list[Tensor]:
    """Codes of all buckets, to or from one worker."""
    return [code for row in rows for code in row.get(worker, [])]


def bytes_of(sends: Iterable[Message]) -> int:
    return sum(m.tensor.numel() * m.tensor.element_size() for m in sends)


def messages(by_worker: Mapping[int, Sequence[Tensor]]) -> list[Message]:
    """Numbered for each worker, as both ends do it."""
    return [Message(j, tensor, tag) for j, tensors in by_worker.items() for tag, tensor in enumerate(tensors)]


@dataclass
class EveryonesParts(Exchange["EveryonesCodes"]):
    """The same of all workers, in a simulation."""

    topology: Topology
    weights: Weights
    size: int
    codec: Codec
    pool: Pool = field(default_factory=Pool, init=False)

    def __post_init__(self) -> None:
        self.coders = [CodedMean(CodedParts(self.codec, rank, self.size, self.pool)) for rank in range(self.size)]
        self.coder = Everyone(self.codec, self.coders)
        self._at = cache(lambda phase: entries(self.topology, self.size, phase, self.weights))

    def neighbours(self, step: int) -> Entries:
        return self._at(step % self.topology.period(self.size))

    def admit(self, buckets: Sequence[Tensor], combine: Combine) -> None:
        for worker in self.coders:
            worker.admit([bucket[0] for bucket in buckets])

    def start(self, message: Sequence[Tensor], step: int, first: int = 0) -> "EveryonesCodes":
        codes = [worker.encode([m[rank] for m in message], step, first) for rank, worker in enumerate(self.coders)]
        return EveryonesCodes(self, step, first, message, codes)

    def depart(self, started: Sequence["EveryonesCodes"], step: int) -> None:
        return  # nothing travels


@dataclass
class EveryonesCodes(Started):
    """Codes of all workers for all owners."""

    exchange: EveryonesParts
    step: int
    first: int
    message: Sequence[Tensor]
    codes: Sequence[Sequence[Mapping[int, Buffers]]]

    def land(self) -> list[Tensor]:
        return [self._mean(place, rows) for place, rows in enumerate(self.message)]

    def _mean(self, place: int, rows: Tensor) -> Tensor:
        mixed = self.exchange.pool.take(rows)
        for owner, worker in enumerate(self.exchange.coders):
            mean = worker.parts.of(owner, real_numbers(rows[owner])) * worker.parts.share
            decoded = torch.empty_like(mean)
            for codes in (row[place].get(owner) for row in self.codes):
                if codes is not None:
                    worker.parts.decode(codes, decoded)
                    mean.add_(decoded, alpha=worker.parts.share)
            worker.parts.reduced(mean, worker.owned[self.first + place], self.step, self.first + place)
            for row in mixed:
                worker.parts.of(owner, real_numbers(row)).copy_(mean)
        return mixed
