"""How a round's messages become mixtures: mixed_i = sum_j w_ij sent_j.

`start(message, step) -> land`, `depart()`, and `land()` waits and returns `mixed`, bucket by bucket. Three ways that
give the same numbers up to rounding: sends and receives between peers, an all-reduce where a step's graph is disjoint
cliques (`clique_exchange`), and `W @ message` in a simulation. Peers may encode what they send.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from lightning_decentral.gossip.compute.codec.codec import Coding
from lightning_decentral.gossip.compute.codec.coded import coder
from lightning_decentral.gossip.compute.codec.quantize import Plain
from lightning_decentral.gossip.compute.combine.combine import Combine
from lightning_decentral.gossip.compute.integrity import Verdicts, finite, header_of, refuse
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import Weights, links
from lightning_decentral.gossip.wire.exchange import Exchange, Land, Tally, Traffic, number
from lightning_decentral.shared.compute.buckets import Matrix, Pool
from lightning_decentral.shared.wire.pending import Pending
from lightning_decentral.shared.wire.transport import Message, Transport


@dataclass
class _Ready:
    """Messages between `start`, `depart` and landing."""

    sends: list[Message]
    receives: list[Message]
    outgoing: Sequence[Pending] = ()
    incoming: Sequence[Pending] = ()
    departed: float = 0.0


@dataclass
class PeerExchange(Exchange):
    """Sends this worker's buckets to those who hear it, hears its sources, and mixes what it accepts.

    Every message is preceded by a header (round, elements of all buckets). A header of another round is an error: some
    worker took another number of optimizer steps, and mixing would pair rounds wrongly without a sign. A message with
    NaN or infinity is refused: its weight falls to the receiver's own parameters, and it is counted.

    Args:
        transport: of this exchange alone.
        codec: of every message.
    """

    topology: Topology
    weights: Weights
    transport: Transport
    device: torch.device
    codec: Coding = Plain()  # noqa: RUF009 - a frozen value
    pool: Pool = field(default_factory=Pool, init=False)
    _verdicts: Verdicts = field(init=False)

    def __post_init__(self) -> None:
        rank, size = self.transport.rank, self.transport.size
        self._verdicts = Verdicts(rank, None if self.codec == Plain() else self.codec)
        self._tally = Tally(self.device)
        self._elements = 0
        self._ready: list[_Ready] = []
        self._plans: dict[int, tuple[dict[int, float], dict[int, float]]] = {}
        self._coder = coder(self.codec, self.topology, rank, size, self.pool)

    def _plan(self, step: int) -> tuple[dict[int, float], dict[int, float]]:
        """(weights of what I hear, {who hears me: with which weight}), computed once per phase of the topology."""
        rank, size = self.transport.rank, self.transport.size
        phase = step % self.topology.period(size)
        if phase not in self._plans:
            self._plans[phase] = links(self.topology, self.weights, rank, size, phase)
        return self._plans[phase]

    def admit(self, buckets: Sequence[Tensor], matrices: Sequence[Sequence[Matrix]], combine: Combine) -> None:
        """Estimates start at worker 0's parameters, where the coder has them: one broadcast."""
        references = [bucket.clone() for bucket in buckets] if self._coder.estimates else buckets
        for reference in references if self._coder.estimates else []:
            self.transport.broadcast(reference).wait()
        self._coder.admit(references, matrices, combine)
        self._elements += sum(bucket.numel() for bucket in buckets)

    def silent(self, step: int) -> bool:
        """No source and no target."""
        row, heard_by = self._plan(step)
        return len(row) == 1 and not heard_by

    def own(self, step: int) -> Tensor:
        """This worker's weight of itself."""
        return number(self._plan(step)[0][self.transport.rank], self.device)

    def degree(self, step: int) -> Tensor:
        """The length of the row but one."""
        return number(len(self._plan(step)[0]) - 1, self.device)

    @property
    def learns(self) -> bool:
        """As the codec."""
        return self._coder.learns

    @property
    def encodes(self) -> bool:
        """As the codec."""
        return self.codec != Plain()

    def copies_sent(self, step: int) -> float:
        """One for each that hears me."""
        return float(len(self._plan(step)[1]))

    def start(self, message: Sequence[Tensor], step: int, first: int = 0) -> Land:
        """Memory until landed: one copy of the message for each source."""
        row, heard_by = self._plan(step)
        sources = sorted(set(row) - {self.transport.rank})
        header = header_of(step, self._elements, message[0].device)
        packets = self._coder.encode(message, heard_by, step, first)
        mine = finite(message)  # now, while it is in the processor's cache
        headers = {j: torch.empty_like(header) for j in sources}
        buffers = {j: self._coder.buffers(j, message, first) for j in sources}

        def messages(peer: int, tensors: Sequence[Tensor]) -> list[Message]:
            return [Message(peer, tensor, tag) for tag, tensor in enumerate(tensors)]

        ready = _Ready(
            sends=[m for j in heard_by for m in messages(j, [header, *packets[j]])],
            receives=[m for j in sources for m in messages(j, [headers[j], *buffers[j]])],
        )
        self._ready.append(ready)
        sent = [tensor for packet in packets.values() for tensor in (header, *packet)]
        self._tally.bytes_sent += sum(t.numel() * t.element_size() for t in sent)

        def land() -> list[Tensor]:
            self._tally.land(ready.incoming, ready.departed, first)
            heard = {j: self._coder.decode(j, tensors, message, first) for j, tensors in buffers.items()}
            healthy = self._judged(step, torch.cat([header, mine.long().view(1)]), heard, headers)
            for j, tensors in heard.items():
                self._coder.remember(j, tensors, healthy[j], first)
                refuse(tensors, message, healthy[j])
            mixed = self._mix(row, message, heard)
            for pending in ready.outgoing:
                pending.wait()
            self._coder.release(packets)
            return mixed

        return land

    def depart(self) -> None:
        """All buckets at once: on a device in one launch."""
        ready, self._ready = self._ready, []
        sends, receives = [m for part in ready for m in part.sends], [m for part in ready for m in part.receives]
        outgoing, incoming = self.transport.exchange(sends, receives) if ready else ([], [])
        for part in ready:
            part.departed = perf_counter()
            part.outgoing, outgoing = outgoing[: len(part.sends)], outgoing[len(part.sends) :]
            part.incoming, incoming = incoming[: len(part.receives)], incoming[len(part.receives) :]

    def _judged(
        self,
        step: int,
        mine: Tensor,
        heard: Mapping[int, Sequence[Tensor]],
        headers: Mapping[int, Tensor],
    ) -> dict[int, Tensor]:
        """{source: whether what it said is finite}"""
        healthy = {j: finite(tensors) for j, tensors in heard.items()}
        rows = {j: torch.cat([headers[j], healthy[j].long().view(1)]) for j in headers}
        self._verdicts.add(step, {self.transport.rank: mine, **rows})
        return healthy

    def _mix(
        self, row: Mapping[int, float], message: Sequence[Tensor], heard: Mapping[int, Sequence[Tensor]]
    ) -> list[Tensor]:
        """w_ii sent_i + sum_j w_ij sent_j over j in order, so that a resumed run rounds alike; in what was heard."""
        if not heard:
            return [self.pool.take(m).copy_(m) for m in message]
        (source, first), *others = heard.items()
        for place, (total, own) in enumerate(zip(first, message, strict=True)):
            total.mul_(row[source]).add_(own, alpha=row[self.transport.rank])
            for j, tensors in others:
                total.add_(tensors[place], alpha=row[j])
                self.pool.give([tensors[place]])
        return list(first)

    def message_bytes(self, message: Sequence[Tensor]) -> int:
        """By the codec's formula."""
        return self._coder.bytes(message)

    def codec_error(self) -> float | None:
        """Measured in rounds 0, 1, 2, 4, 8 and so on."""
        return self._coder.error()

    def state_dict(self) -> dict[str, Any]:
        """The codec's estimates."""
        return self._coder.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """ValueError where the checkpoint was made with another codec."""
        self._coder.load_state_dict(state)

    def traffic(self) -> Traffic:
        """Counters since construction."""
        return self._tally.traffic(self._verdicts.refused)
