"""How a round's messages become mixtures: mixed_i = sum_j w_ij sent_j.

`start(message, step) -> land`, and `land()` waits and returns `mixed`, bucket by bucket. Three ways that give the same
numbers up to rounding: sends and receives between peers, an all-reduce where a step's graph is disjoint cliques, and
`W @ message` in a simulation. Peers may encode what they send.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from lightning_decentral.buckets import Matrix, Pool
from lightning_decentral.gossip.codec import Plain
from lightning_decentral.gossip.coders import coder
from lightning_decentral.gossip.coding import Coding
from lightning_decentral.gossip.combine.rule import Combine
from lightning_decentral.gossip.mixing import Mixings
from lightning_decentral.gossip.topology import Topology
from lightning_decentral.gossip.verdict import Verdicts, refuse
from lightning_decentral.gossip.weights import Weights, links
from lightning_decentral.gossip.wire import Exchange as Exchange
from lightning_decentral.gossip.wire import Land as Land
from lightning_decentral.gossip.wire import Traffic as Traffic
from lightning_decentral.gossip.wire import degree_column, number
from lightning_decentral.stopwatch import stopwatch
from lightning_decentral.transport import Message, Transport


@dataclass
class MatrixExchange(Exchange):
    """mixed = W_t @ message, the workers as the first axis: the simulator's exchange."""

    topology: Topology
    weights: Weights
    size: int
    pool: Pool = field(default_factory=Pool, init=False)

    def __post_init__(self) -> None:
        self._mixings = Mixings(self.topology, self.weights, self.size)

    def silent(self, step: int) -> bool:
        """Whether nobody talks at this step."""
        return self._mixings.at(step).silent

    def own(self, step: int) -> Tensor:
        """The diagonal of W_t as a column."""
        return torch.from_numpy(self._mixings.at(step).entries.diagonal).unsqueeze(1)

    def degree(self, step: int) -> Tensor:
        """Of every worker, as a column."""
        return degree_column(self.topology, self.size, step)

    def start(self, message: Sequence[Tensor], step: int) -> Land:
        """Multiply at once; nothing travels."""
        mixed = [self._mixings.at(step)(m, out=self.pool.take(m)) for m in message]
        return lambda: mixed


@dataclass
class PeerExchange(Exchange):
    """Sends this worker's buckets to those who hear it, hears its sources, and mixes what it accepts.

    Every message is preceded by a header (round, elements). A header of another round is an error: some worker took
    another number of optimizer steps, and mixing would pair rounds wrongly without a sign. A message with NaN or
    infinity is refused: its weight falls to the receiver's own parameters, and it is counted.

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
        self._waited = stopwatch(self.device)
        self._rounds, self._bytes_sent, self._in_flight_seconds = 0, 0, 0.0
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

    def copies_sent(self, step: int) -> float:
        """One for each that hears me."""
        return float(len(self._plan(step)[1]))

    def start(self, message: Sequence[Tensor], step: int) -> Land:
        """Start the round's transfers. Memory until landed: one copy of the parameters for each source."""
        row, heard_by = self._plan(step)
        sources = sorted(set(row) - {self.transport.rank})
        header = _header(step, message)
        packets = self._coder.encode(message, heard_by, step)
        headers = {j: torch.empty_like(header) for j in sources}
        buffers = {j: self._coder.buffers(j, message) for j in sources}

        def messages(peer: int, tensors: Sequence[Tensor]) -> list[Message]:
            return [Message(peer, tensor, tag) for tag, tensor in enumerate(tensors)]

        outgoing, incoming = self.transport.exchange(
            sends=[m for j in heard_by for m in messages(j, [header, *packets[j]])],
            receives=[m for j in sources for m in messages(j, [headers[j], *buffers[j]])],
        )
        launched = perf_counter()
        sent = [tensor for packet in packets.values() for tensor in (header, *packet)]
        self._bytes_sent += sum(t.numel() * t.element_size() for t in sent)

        def land() -> list[Tensor]:
            self._waited.start()
            for pending in incoming:
                pending.wait()
            self._waited.stop()
            self._in_flight_seconds += perf_counter() - launched
            self._rounds += 1
            heard = {j: self._coder.decode(j, tensors, message) for j, tensors in buffers.items()}
            mixed = self._mix(row, message, heard, headers, header)
            for pending in outgoing:
                pending.wait()
            self._coder.release(packets)
            return mixed

        return land

    def _mix(
        self,
        row: Mapping[int, float],
        message: Sequence[Tensor],
        heard: Mapping[int, Sequence[Tensor]],
        headers: Mapping[int, Tensor],
        header: Tensor,
    ) -> list[Tensor]:
        """w_ii sent_i + sum_j w_ij sent_j over j in order, so that a resumed run rounds alike; in what was heard."""
        mine = _finite(message)
        healthy = {j: _finite(tensors) for j, tensors in heard.items()}
        rows = {j: torch.cat([headers[j], healthy[j].long().view(1)]) for j in headers}
        self._verdicts.add({self.transport.rank: torch.cat([header, mine.long().view(1)]), **rows})
        if not heard:
            return [self.pool.take(m).copy_(m) for m in message]
        for j, tensors in heard.items():
            self._coder.remember(j, tensors, healthy[j])
            refuse(tensors, message, healthy[j])
            for tensor in tensors:
                tensor.mul_(row[j])
        first, *others = heard.values()
        for total, own, *rest in zip(first, message, *others, strict=True):
            total.add_(own, alpha=row[self.transport.rank])
            for tensor in rest:
                total.add_(tensor)
            self.pool.give(rest)
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
        refused = self._verdicts.refused
        return Traffic(self._rounds, self._bytes_sent, self._waited.seconds(), self._in_flight_seconds, refused)


@dataclass
class CliqueExchange(Exchange):
    """All-reduce inside disjoint cliques: the mean of this worker's clique, at 2 (c - 1) / c of the parameters' bytes
    for a clique of c workers, where sends and receives would take c - 1.

    A message with NaN or infinity is left out of the mean by its own sender, and counted by the others.

    Args:
        cliques: one partition of the workers for each phase (`cliques.partitions`).
        transports: one for each clique of more than one worker that this worker belongs to.
    """

    cliques: Sequence[Sequence[tuple[int, ...]]]
    transports: Mapping[tuple[int, ...], Transport]
    rank: int
    device: torch.device
    pool: Pool = field(default_factory=Pool, init=False)
    _verdicts: Verdicts = field(init=False)

    def __post_init__(self) -> None:
        self._verdicts = Verdicts(self.rank)
        self._waited = stopwatch(self.device)
        self._rounds, self._bytes_sent, self._in_flight_seconds = 0, 0, 0.0

    def _clique(self, step: int) -> tuple[int, ...]:
        return next(c for c in self.cliques[step % len(self.cliques)] if self.rank in c)

    def silent(self, step: int) -> bool:
        """This worker's clique is itself alone."""
        return len(self._clique(step)) == 1

    def own(self, step: int) -> Tensor:
        """1 / c."""
        return number(1 / len(self._clique(step)), self.device)

    def degree(self, step: int) -> Tensor:
        """c - 1."""
        return number(len(self._clique(step)) - 1, self.device)

    def copies_sent(self, step: int) -> float:
        """2 (c - 1) / c, of a ring all-reduce."""
        clique = self._clique(step)
        return 2 * (len(clique) - 1) / len(clique)

    def start(self, message: Sequence[Tensor], step: int) -> Land:
        """Start the all-reduces. Memory until landed: one copy of the parameters."""
        clique = self._clique(step)
        transport = self.transports[clique]
        finite = _finite(message)
        header = _header(step, message)
        gathering, rows = transport.all_gather(torch.cat([header, finite.long().view(1)]))
        totals = [torch.div(m, len(clique), out=self.pool.take(m)) for m in message]
        refuse(totals, [torch.zeros((), dtype=m.dtype, device=m.device) for m in message], finite)
        reducing = [transport.all_reduce(total) for total in totals]
        launched = perf_counter()
        payload = sum(t.numel() * t.element_size() for t in totals)
        self._bytes_sent += 2 * (len(clique) - 1) * payload // len(clique)

        def land() -> list[Tensor]:
            self._waited.start()
            for pending in (gathering, *reducing):
                pending.wait()
            self._waited.stop()
            self._in_flight_seconds += perf_counter() - launched
            self._rounds += 1
            self._verdicts.add(dict(zip(clique, rows, strict=True)))
            share = torch.stack(rows)[:, 2].sum().clamp(min=1) / len(clique)  # 1 unless someone's message was refused
            return [total.div_(share.to(total.dtype)) for total in totals]

        return land

    def traffic(self) -> Traffic:
        """Counters since construction."""
        refused = self._verdicts.refused
        return Traffic(self._rounds, self._bytes_sent, self._waited.seconds(), self._in_flight_seconds, refused)


def _header(step: int, message: Sequence[Tensor]) -> Tensor:
    """(round, elements), filled on the device as `number` is."""
    numbers = (step, sum(m.numel() for m in message))
    return torch.stack([torch.full((), n, dtype=torch.int64, device=message[0].device) for n in numbers])


def _finite(tensors: Sequence[Tensor]) -> Tensor:
    """A scalar: no element is NaN or infinite. One pass each and no copy: the extremes carry both."""
    real = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    return torch.stack([torch.isfinite(extreme) for t in real for extreme in torch.aminmax(t)]).all()
