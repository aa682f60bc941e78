"""One worker's ends of links on which two neighbours compress the difference between them."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_decentral.gossip.compute.codec.codec import Coding, MessageLayout, PayloadPart, check_codec
from lightning_decentral.gossip.compute.codec.coder import Buffers, Coder
from lightning_decentral.gossip.compute.codec.counter_rng import key, uniform
from lightning_decentral.gossip.compute.codec.low_rank import Factors, factors, orthonormal
from lightning_decentral.gossip.compute.combine.combine import Combine
from lightning_decentral.gossip.plan.checks import check_symmetric
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import Weights
from lightning_decentral.shared.compute.buckets import Matrix, Pool

RANDOM_SHARE = 1e-6


@dataclass(frozen=True, kw_only=True)
class PowerGossip(Coding):
    """i sends M_i S, hears M_j S:  D = (M_j - M_i) S;  i takes M_i + D S^T for M_j;  S <- orthonormal(D), and next time
    the same with M^T.

    For each matrix M [m, c] of the message; S [c, rank], or [m, rank] for M^T, is orthonormal, both ends of a link have
    it, and it starts the next power iteration warm: the directions in which the two differ most. D S^T is the
    difference's projection, so what one end gains the other loses, and no rate has to be tuned for the compression.
    Vectors, and matrices for which rank (m + c) >= m c, are sent as they are.

    Bytes: rank m and rank c elements of each matrix in turn, so rank (m + c) / 2 on average; half of `LowRank`'s.

    S is orthonormal(D / ||D|| + 1e-6 R), R random and the same at both ends: where two neighbours are equal, or equal
    in the directions looked at, the next S is a new random one instead of the same again.

    Args:
        rank: columns of S.

    Raises:
        ValueError: rank is below 1; at set-up, where the mixing matrix isn't symmetric.

    Source: Vogels et al. 2008.01425 (PowerGossip), with one half iteration in a round, as the authors' code has it.
    """

    remembers: ClassVar[bool] = True
    rank: int = 4

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"PowerGossip's rank must be at least 1, got {self.rank}: 1 to 8 are usual")

    def check(self, topology: Topology, size: int, weights: Weights, delay: int) -> None:
        """Both ends of a link answer each other, with one weight; one round at a time, since a link learns where a
        round lands and a checkpoint lands all that are in flight."""
        if delay > 1:
            raise ValueError(
                f"{self} takes one round at a time, got delay={delay}: use delay=1 or 0, or "
                "codec=DifferenceCompression(LowRank())"
            )
        check_symmetric("PowerGossip", topology, size, weights, "codec=DifferenceCompression(LowRank())")

    def half(self, layout: MessageLayout, turn: int) -> "Half":
        """What is sent of such a message in the turn-th round of a link."""
        return Half(factors(layout, self.rank), transposed=turn % 2 == 1)

    def bytes(self, layout: MessageLayout, dtype: torch.dtype) -> int:
        """Of a payload on the wire, the mean of an even and an odd turn."""
        return sum(self.half(layout, turn).part(dtype).bytes for turn in (0, 1)) // 2


class Paired(Coder):
    """Every link has its own bases, equal at both ends: what either computes them from, both have.

    Args:
        rank: of this worker.
    """

    learns = True  # bases follow from what both ends heard

    def __init__(self, codec: PowerGossip, rank: int, pool: Pool) -> None:
        self._codec, self._rank, self._pool = codec, rank, pool
        self._buckets: list[tuple[int, Sequence[Matrix]]] = []
        self._links: dict[tuple[int, int], _Link] = {}

    def admit(self, references: Sequence[Tensor], matrices: Sequence[Sequence[Matrix]], combine: Combine) -> None:
        """Their lengths and matrices."""
        self._buckets += [(len(r), m) for r, m in zip(references, matrices, strict=True)]

    def _layouts(self, message: Sequence[Tensor], first: int = 0) -> list[MessageLayout]:
        pairs = zip(message, self._buckets[first:], strict=False)
        return [MessageLayout.of(len(m), matrices, length) for m, (length, matrices) in pairs]

    def _link(self, peer: int, bucket: int) -> "_Link":
        if (peer, bucket) not in self._links:
            edge = min(self._rank, peer), max(self._rank, peer)
            sign = 1.0 if self._rank < peer else -1.0
            self._links[peer, bucket] = _Link(self._codec, key(*edge, bucket), sign)
        return self._links[peer, bucket]

    def encode(
        self, message: Sequence[Tensor], targets: Mapping[int, float], step: int, first: int
    ) -> dict[int, Buffers]:
        """{target: its sketches}. The message stays: a hearer learns how it differs from it."""
        payloads: dict[int, Buffers] = {target: self.buffers(target, message, first) for target in targets}
        for place, (m, layout) in enumerate(zip(message, self._layouts(message, first), strict=True)):
            for target in targets:
                self._link(target, first + place).encode(m, payloads[target][place], layout)
        return payloads

    def buffers(self, source: int, message: Sequence[Tensor], first: int) -> Buffers:
        """As long as what both send in this turn of the link."""
        sizes = [
            self._codec.half(layout, self._link(source, bucket).turn).part(m.dtype).elements
            for bucket, (m, layout) in enumerate(zip(message, self._layouts(message, first), strict=True), first)
        ]
        pairs = zip(sizes, message, strict=True)
        return [self._pool.take_new(torch.Size([size]), m.dtype, m.device) for size, m in pairs]

    def decode(self, source: int, buffers: Buffers, message: Sequence[Tensor], first: int) -> Buffers:
        """What is here, and the difference as far as both saw it."""
        decoded = [self._pool.take(m).copy_(m) for m in message]
        for bucket, (out, payload) in enumerate(zip(decoded, buffers, strict=True), first):
            self._link(source, bucket).decode(payload, out)
        self._pool.give(buffers)
        return decoded

    def remember(self, source: int, decoded: Sequence[Tensor], healthy: Tensor, first: int) -> None:
        """The next bases; new ones where the message was refused."""
        for bucket in range(first, first + len(decoded)):
            self._link(source, bucket).learn(healthy)

    def release(self, sent: Mapping[int, Buffers]) -> None:
        """Back to the pool."""
        for payload in sent.values():
            self._pool.give(payload)

    def bytes(self, message: Sequence[Tensor]) -> int:
        """By the codec's formula, the mean of two turns."""
        return sum(self._codec.bytes(lay, m.dtype) for m, lay in zip(message, self._layouts(message), strict=True))

    def state_dict(self) -> dict[str, Any]:
        """The bases of every link that has talked."""
        links = [(peer, bucket, link.turn, link.basis) for (peer, bucket), link in self._links.items()]
        return {"codec": repr(self._codec), "links": [link for link in links if link[3] is not None]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with them.

        Raises:
            ValueError: they were made by another codec.
        """
        check_codec(state, repr(self._codec))
        for peer, bucket, turn, basis in state["links"]:
            link = self._link(peer, bucket)
            link.turn, link.basis = turn, basis.clone()


class _Link:
    """One bucket on one link.

    Args:
        key: of the link's random numbers, equal at both ends.
        sign: of heard - own; both ends compute bases from one difference.

    Attributes:
        turn: half iterations so far.
        basis: all S, one behind the other, at least in single precision.
    """

    def __init__(self, codec: PowerGossip, key: int, sign: float) -> None:
        self._codec, self._key, self._sign = codec, key, sign
        self.turn = 0
        self.basis: Tensor | None = None
        self._flights: deque[tuple[int, Half, Tensor, Tensor]] = deque()
        self._learnt: Tensor | None = None

    def encode(self, message: Tensor, payload: Tensor, layout: MessageLayout) -> None:
        """M S, and the rest as it is."""
        half, basis = self._codec.half(layout, self.turn), self._basis(layout, message)
        for matrix, S, sketch in zip(half.matrices(message), half.bases(basis), half.sketches(payload), strict=True):
            sketch.copy_(matrix.to(S.dtype) @ S)
        for rest, sent in half.rest(message, payload):
            sent.copy_(rest)
        self._flights.append((self.turn, half, basis, payload))

    def _basis(self, layout: MessageLayout, message: Tensor) -> Tensor:
        if self.basis is None:
            half, wide = self._codec.half(layout, self.turn), torch.promote_types(message.dtype, torch.float32)
            wide = wide.to_real()
            basis = torch.zeros(half.basis_elements, dtype=wide, device=message.device)
            self.basis = self._orthonormal(half.bases(basis), basis)
        self.basis = self.basis.to(message.device)
        return self.basis

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """out <- out + D S^T of what was sent first and didn't land yet."""
        turn, half, basis, own = self._flights.popleft()
        learnt = basis.new_empty(half.sketch_elements)
        sketches = zip(half.sketches(payload), half.sketches(own), half.sketches(learnt), strict=True)
        for matrix, S, (theirs, mine, D) in zip(half.matrices(out), half.bases(basis), sketches, strict=True):
            torch.sub(theirs, mine, out=D) if theirs.dtype == D.dtype else D.copy_(theirs).sub_(mine)
            matrix.add_((D @ S.T).to(matrix.dtype))
        for rest, sent in half.rest(out, payload):
            rest.copy_(sent)
        self.turn = turn + 1  # two in flight look the same way
        self._learnt = self._orthonormal(half.sketches(learnt.mul_(self._sign)), learnt)

    def _orthonormal(self, differences: Any, like: Tensor) -> Tensor:
        """orthonormal(D / ||D|| + 1e-6 R) of each D."""
        bases = []
        for place, D in enumerate(differences):
            R = uniform(D.shape[0], D.shape[1], key(self._key, self.turn, place), like)
            size = torch.linalg.vector_norm(D)
            bases.append(orthonormal((D / size).where(size > 0, 0) + RANDOM_SHARE * R).reshape(-1))
        return torch.cat(bases) if bases else like[:0]

    def learn(self, healthy: Tensor) -> None:
        """S <- the next one; 0, from which comes a random one, where what was heard isn't finite."""
        assert self._learnt is not None
        self.basis, self._learnt = self._learnt.where(healthy, 0), None


@dataclass(frozen=True)
class Half:
    """A payload: M S [m, rank] of each matrix M [m, c], or M^T S [c, rank], then all that is in none of them."""

    plan: Factors
    transposed: bool

    def part(self, dtype: torch.dtype) -> PayloadPart:
        """The payload as a tensor."""
        return PayloadPart(self._length(self.transposed) + sum(stop - start for start, stop in self.plan.others), dtype)

    @property
    def basis_elements(self) -> int:
        """Of all S together."""
        return self._length(not self.transposed)

    @property
    def sketch_elements(self) -> int:
        """Of all M S together: so many open the payload."""
        return self._length(self.transposed)

    def _length(self, transposed: bool) -> int:
        return self.plan.rank * sum(_side(m, transposed) for m in self.plan.matrices)

    def matrices(self, message: Tensor) -> Iterator[Tensor]:
        """[m, c] or [c, m], views of the message."""
        for offset, rows, columns in self.plan.matrices:
            matrix = message[offset : offset + rows * columns].view(rows, columns)
            yield matrix.T if self.transposed else matrix

    def bases(self, basis: Tensor) -> Iterator[Tensor]:
        """Each S, a view."""
        return self._columns(basis, not self.transposed)

    def sketches(self, payload: Tensor) -> Iterator[Tensor]:
        """Each M S, a view."""
        return self._columns(payload, self.transposed)

    def _columns(self, flat: Tensor, transposed: bool) -> Iterator[Tensor]:
        at = 0
        for matrix in self.plan.matrices:
            end = at + _side(matrix, transposed) * self.plan.rank
            yield flat[at:end].view(-1, self.plan.rank)
            at = end

    def rest(self, message: Tensor, payload: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(part of the message outside of the matrices, its place in the payload)."""
        at = self.sketch_elements
        for start, stop in self.plan.others:
            yield message[start:stop], payload[at : at + stop - start]
            at += stop - start


def _side(matrix: Matrix, transposed: bool) -> int:
    return matrix.columns if transposed else matrix.rows
