"""All-reduce of codes: each worker owns a part of the mean, adds up the part's codes and sends its encoded mean to all.

    launch      encode each part for its owner      depart    send the codes, and a header to all
    land        wait, decode, add up, encode the own part's mean, send it to all, wait, decode

The arithmetic, and the owner's residual of rounding, are in `shared.compute.codec.coded_parts`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from lightning_decentral.gossip.compute.combine.combine import Combine
from lightning_decentral.gossip.compute.error_feedback import CodedMean
from lightning_decentral.gossip.compute.link import Buffers
from lightning_decentral.gossip.compute.mixing import refuse
from lightning_decentral.gossip.wire.exchange import HEADER, Copied, EarlyArrival, Traffic
from lightning_decentral.gossip.wire.peer import Arrivals, bytes_of, messages
from lightning_decentral.shared.compute.codec.blocks import real
from lightning_decentral.shared.compute.codec.coded_parts import CodedParts
from lightning_decentral.shared.compute.health import judged, stated
from lightning_decentral.shared.wire.transport import Message, Transport


@dataclass
class CodedMessage(EarlyArrival):
    """Message in flight: a bucket's codes for the owners of its parts, and the owners' means coming back."""

    exchange: "CodedCliqueExchange"
    step: int
    place: int
    sent: Tensor  # [elements]
    headers: Tensor  # int64 [workers, HEADER]: this worker's, then each other's
    codes: Mapping[int, Buffers]  # {owner: codes of its part}
    buffers: Mapping[int, Buffers]  # {worker: where its codes of the own part are received}
    together = True
    arrived: tuple[Tensor, Tensor] | None = None

    def sends(self) -> list[Message]:
        return messages({j: [self.headers[0], *self.codes.get(j, [])] for j in self.exchange.others})

    def receives(self) -> list[Message]:
        rows = zip(self.exchange.others, self.headers[1:], strict=True)
        return messages({j: [row, *self.buffers.get(j, [])] for j, row in rows})

    def arrive(self) -> list[Tensor]:
        self.arrived = mixed, sane = self.exchange.receive(self)
        return [self.headers, sane, mixed]

    def land(self) -> Tensor:
        exchange = self.exchange
        mixed, sane = self.arrived or exchange.receive(self)
        exchange.verdicts.judge(self.step, [exchange.transport.rank, *exchange.others], self.headers, sane)
        if exchange.verdicts.complaint:  # rare, so that the host may wait for the device's verdict
            exchange.verdicts.refuse_own(torch.zeros_like(self.sent), mixed, late=bool(sane[0]))
        return mixed


@dataclass
class CodedCliqueExchange(Arrivals[CodedMessage]):
    """mixed = Q((1/n) sum_j sent_j + f), the same bits on all workers, where all receive from all with equal weights.

    A message with NaN, infinity or far too large numbers counts as zero, for every owner alike, and is counted as
    refused. `transport` sends codes to their owners; the codec must have no estimates."""

    back: Transport = field(kw_only=True)  # sends the owners' codes, for this exchange alone
    coder: CodedMean = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        rank, size = self.transport.rank, self.transport.size
        self._parts = CodedParts(self.codec, rank, size, self.pool)
        self.coder, self.others = CodedMean(self._parts), [j for j in range(size) if j != rank]
        self._sent_back = 0

    def admit(self, buckets: Sequence[Tensor], combine: Combine) -> None:
        self.coder.admit(buckets)
        self._elements += sum(bucket.numel() for bucket in buckets)

    def launch(self, message: Tensor, step: int, place: int, copied: Copied | None = None) -> CodedMessage:
        """Launch a message. Memory until mixed: its codes, and the own part's codes from each other worker."""
        sent = self._copy(message, copied)
        codes = self.coder.encode(sent, step, place)
        headers = torch.empty(self._parts.size, HEADER, dtype=torch.int64, device=self.device)
        # Of the decoded message, which may overflow: so all workers judge it alike, whatever part they own.
        headers[0].copy_(stated([step, self._elements], [sent], self.device))
        return CodedMessage(self, step, place, sent, headers, codes, self._parts.from_others(real(sent)))

    def receive(self, message: CodedMessage) -> tuple[Tensor, Tensor]:
        """Return (the mean of all, bool [workers]: whose message is sound, the own first), on the current stream."""
        self.waited.during(pending.wait for pending in message.incoming)
        sane = judged(message.headers)
        mean = self._mean(message, sane)
        codes = self._parts.reduced(mean, self.coder.owned[message.place], message.step, message.place)
        for pending in message.outgoing:
            pending.wait()
        self.pool.give(code for row in (message.codes, message.buffers) for codes in row.values() for code in codes)
        mixed = self.pool.take(message.sent)
        self._gather(mixed, mean, codes)
        self.pool.give([mean])
        return mixed, sane

    def _mean(self, message: CodedMessage, sane: Tensor) -> Tensor:
        """(1/n) sum_j sent_j of the own part over sound messages, always in the same order."""
        own = self._parts.of(self.transport.rank, real(message.sent))
        mean, decoded = self.pool.take(own).copy_(own), self.pool.take(own)
        # On a GPU without asking, which would wait.
        nothing = torch.zeros_like(own) if self.device.type == "cuda" or not bool(sane.all()) else own
        refuse(mean, nothing, sane[0])
        mean.mul_(self._parts.share)
        for healthy, codes in zip(sane[1:], (message.buffers.get(j) for j in self.others), strict=True):
            if codes is not None:
                self._parts.decode(codes, decoded)
                refuse(decoded, nothing, healthy)
                mean.add_(decoded, alpha=self._parts.share)
        self.pool.give([decoded])
        return mean

    def _gather(self, mixed: Tensor, mean: Tensor, codes: Buffers) -> None:
        """mixed <- the means of all parts: the own, and the other owners' means decoded."""
        whole = real(mixed)
        buffers = self._parts.from_owners(whole)
        sends, receives = messages(dict.fromkeys(self.others, codes)), messages(buffers)
        outgoing, incoming = self.back.exchange(sends, receives)
        self._sent_back += bytes_of(sends)  # counted separately from bytes that another thread sends
        self.waited.during(pending.wait for pending in incoming)
        self._parts.of(self.transport.rank, whole).copy_(mean)
        for owner, received in buffers.items():
            self._parts.decode(received, self._parts.of(owner, whole))
        for pending in outgoing:
            pending.wait()
        self.pool.give([*codes, *chain(*buffers.values())])

    def traffic(self) -> Traffic:
        return super().traffic() + Traffic(bytes_sent=self._sent_back)
