"""Simulation of gossip: all workers in one process, with the real rule and mixer, over the matrix W_t."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_decentral.gossip.compute.combine.combine import Combine, Rule
from lightning_decentral.gossip.compute.error_feedback import CodedMean, coder_of
from lightning_decentral.gossip.compute.link import Buffers, Coder, Everyone, cliques_of
from lightning_decentral.gossip.plan.planned_traffic import Cliques
from lightning_decentral.gossip.plan.topology.topology import Topology, at_least_one
from lightning_decentral.gossip.plan.weights import Entries, Neighbours, Weights, compressed, entries, neighbours
from lightning_decentral.gossip.wire.consensus import mixer_of
from lightning_decentral.gossip.wire.exchange import Copied, Exchange, Landed, MessageInFlight
from lightning_decentral.shared.compute.buckets import LooseBucket, Pool
from lightning_decentral.shared.compute.codec.blocks import real
from lightning_decentral.shared.compute.codec.codec import Codec, Plain
from lightning_decentral.shared.compute.codec.coded_parts import CodedParts
from lightning_decentral.shared.plan.arguments import at_least, checked

Gradient = Callable[[Tensor, int], Tensor]


def simulate(
    topology: Topology,
    combine: Rule,
    gradient: Gradient,
    x0: Tensor,
    steps: int,
    learning_rate: float | Callable[[int], float],
    delay: int = 1,
    weights: Weights | None = None,
    codec: Codec | None = None,
    every: int = 1,
    exact_steps: int = 0,
) -> Tensor:
    """x_i <- x_i - learning_rate * gradient(x, step)_i, then one round of the mixer, `steps` times.

    Args:
        gradient: (x [size, dim], step) -> [size, dim], row i the gradient of worker i at its own x_i.
        x0: initial parameters [size, dim], row i of worker i; each fragment of a `Stream` has consecutive columns.
        steps: number of updates.
        learning_rate: a number, or a function of the step.
        delay: updates between sending and mixing, as in `Mixer`.
        weights: mixing weights; by default the rule's.
        codec: codec of every message; by default messages aren't encoded.
        every: steps between kept parameters; `every=steps` keeps only the last.
        exact_steps: number of first steps that average all workers exactly instead of a round.

    Returns:
        [steps // every + 1, size, dim]: x0 and the parameters after each step, or after each `every`-th.

    Raises:
        ValueError: `every` below 1.
    """
    at_least_one("every", every, "1 keeps the parameters after each step, k after each k-th")
    size, rows = x0.shape[0], x0.detach().clone()
    mixers = []
    for part, columns in zip(topology.fragments, rows.chunk(len(topology.fragments), dim=1), strict=True):
        exchange = _exchange(part, weights or combine.weights, size, codec or Plain(), combine)
        mixers.append(mixer_of(combine.placed(part, size), exchange, delay, lambda: None))
        mixers[-1].extend([LooseBucket(columns)])
    trajectory = [x0.detach().clone()]
    for step in range(steps):
        rate = learning_rate(step) if callable(learning_rate) else learning_rate
        rows.sub_(gradient(rows, step), alpha=rate)
        for mixer in mixers:
            if step < exact_steps:
                mixer.restart(lambda flats: ([t.mean(0, keepdim=True).expand_as(t).clone() for t in flats], ""))
            else:
                mixer.step(rate)
        if (step + 1) % every == 0:
            trajectory.append(rows.clone())
    return torch.stack(trajectory)


def _exchange(topology: Topology, weights: Weights, size: int, codec: Codec, combine: Rule) -> Exchange[Any]:
    if cliques_of(codec, combine, topology, weights, size) is Cliques.OWNERS:
        return EveryonesParts(topology, weights, size, codec)
    if codec.encodes:
        return LinkExchange(topology, weights, size, codec)
    return MatrixExchange(topology, weights, size)


M = TypeVar("M", bound=MessageInFlight)


@dataclass
class Everyones(Exchange[M]):
    """Exchange between all workers in one process, the first axis of every tensor, over the links of W_t. Steps that
    differ by a period share a W_t, and all steps without messages share one."""

    topology: Topology
    weights: Weights
    size: int
    pool: Pool = field(default_factory=Pool, init=False)

    def __post_init__(self) -> None:
        silence = compressed([{rank: 1.0} for rank in range(self.size)])

        @cache
        def at(phase: int) -> Entries:
            found = entries(self.topology, self.size, phase, self.weights)
            return silence if found.silent else found

        self._at = at

    def neighbours(self, step: int) -> Entries:
        return self._at(step % self.topology.period(self.size))


@dataclass
class LinkExchange(Everyones["LinkMessage"]):
    """Simulated exchange of encoded messages, link by link, as `MatrixExchange` for unencoded messages."""

    codec: Codec

    def __post_init__(self) -> None:
        super().__post_init__()
        self.coders = [coder_of(self.codec, self.topology, rank, self.size, self.pool) for rank in range(self.size)]
        self.coder = Everyone(self.codec, self.coders)

    def admit(self, buckets: Sequence[Tensor], combine: Combine) -> None:
        for worker in self.coders:
            # Estimates start at worker 0's parameters, which `PeerExchange` broadcasts.
            worker.admit([bucket[0].clone() for bucket in buckets], combine)

    def launch(self, message: Tensor, step: int, place: int, copied: Copied | None = None) -> "LinkMessage":
        sent = self._copy(message, copied)
        everyone = [neighbours(self.topology, self.weights, rank, self.size, step) for rank in range(self.size)]
        links = zip(self.coders, everyone, strict=True)
        packets = [worker.encode(sent[at.rank], at.targets, step, place) for worker, at in links]
        return LinkMessage(self, place, sent, everyone, packets)


@dataclass
class LinkMessage(MessageInFlight):
    """Messages of all workers on all links, in flight."""

    exchange: LinkExchange
    place: int
    sent: Tensor  # [workers, elements]
    everyone: Sequence[Neighbours]
    packets: Sequence[Mapping[int, list[Tensor]]]

    def land(self) -> Tensor:
        mixed = self.exchange.pool.take(self.sent)
        # A simulation refuses no message: a NaN shows in the trajectory.
        healthy = torch.ones((), dtype=torch.bool)
        for at, worker in zip(self.everyone, self.exchange.coders, strict=True):
            own, total = self.sent[at.rank], mixed[at.rank]
            # Cloned: decoding consumes a payload, and all targets of an audience share it.
            payloads = {j: [t.clone() for t in self.packets[j][at.rank]] for j in at.sources}
            received = worker.decode(payloads, own, self.place)
            worker.remember(received, [healthy] * len(received), self.place)
            torch.mul(own, at.own, out=total)
            for j in at.sources:
                total.add_(received[j], alpha=at.row[j])
        return mixed


@dataclass
class EveryonesParts(Everyones["EveryonesCodes"]):
    """Simulated all-reduce of codes by owners of parts, as in `CodedCliqueExchange`."""

    codec: Codec

    def __post_init__(self) -> None:
        super().__post_init__()
        self.coders = [CodedMean(CodedParts(self.codec, rank, self.size, self.pool)) for rank in range(self.size)]
        self.coder = Everyone(self.codec, self.coders)

    def admit(self, buckets: Sequence[Tensor], combine: Combine) -> None:
        for worker in self.coders:
            worker.admit([bucket[0] for bucket in buckets])

    def launch(self, message: Tensor, step: int, place: int, copied: Copied | None = None) -> "EveryonesCodes":
        sent = self._copy(message, copied)
        codes = [worker.encode(sent[rank], step, place) for rank, worker in enumerate(self.coders)]
        return EveryonesCodes(self, step, place, sent, codes)


@dataclass
class EveryonesCodes(MessageInFlight):
    """Codes of all workers for all owners, in flight."""

    exchange: EveryonesParts
    step: int
    place: int
    sent: Tensor  # [workers, elements]
    codes: Sequence[Mapping[int, Buffers]]

    def land(self) -> Tensor:
        mixed = self.exchange.pool.take(self.sent)
        for owner, worker in enumerate(self.exchange.coders):
            mean = worker.parts.of(owner, real(self.sent[owner])) * worker.parts.share
            decoded = torch.empty_like(mean)
            for codes in (row.get(owner) for row in self.codes):
                if codes is not None:
                    worker.parts.decode(codes, decoded)
                    mean.add_(decoded, alpha=worker.parts.share)
            worker.parts.reduced(mean, worker.owned[self.place], self.step, self.place)
            for row in mixed:
                worker.parts.of(owner, real(row)).copy_(mean)
        return mixed


HALVES = (torch.bfloat16, torch.float16)


@checked
@dataclass
class MatrixExchange(Everyones[MessageInFlight]):
    """The simulator's exchange: mixed = W_t @ message, with workers as the first axis, in the message's type."""

    def __post_init__(self) -> None:
        at_least(1, "give the number of workers", size=self.size)
        super().__post_init__()
        self.coder = Coder(self.pool)
        self._matrix = cache(lambda phase, dtype, device: as_tensor(self.neighbours(phase)).to(device, dtype))

    def admit(self, buckets: Sequence[Tensor], combine: Combine) -> None:
        return

    def launch(self, message: Tensor, step: int, place: int, copied: Copied | None = None) -> MessageInFlight:
        sent = self._copy(message, copied)
        # In float32 and rounded once: rounded weights like 1/3 would move the mean.
        exact, mixed = torch.float32 if sent.dtype in HALVES else sent.dtype, self.pool.take(sent)
        matrix = self._matrix(step % self.topology.period(self.size), exact, sent.device)
        if exact == sent.dtype:
            return Landed(sent, torch.mm(matrix, sent, out=mixed))
        return Landed(sent, mixed.copy_(torch.mm(matrix, sent.to(exact))))


def as_tensor(entries: Entries) -> Tensor:
    """Convert W to a tensor [size, size], with compressed rows if W is mostly zero."""
    if not entries.mostly_zero:
        return torch.from_numpy(entries.dense())
    starts, columns, values = map(torch.from_numpy, (entries.starts, entries.columns, entries.values))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR", UserWarning)  # torch calls the layout beta
        shape = (entries.size, entries.size)
        return torch.sparse_csr_tensor(starts, columns, values, shape, check_invariants=False)
