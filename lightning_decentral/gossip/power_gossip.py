"""Power iteration on the difference of two neighbours' matrices, half an iteration in each round."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_decentral.buckets import Matrix
from lightning_decentral.gossip.coding import Coding, Layout, Part
from lightning_decentral.gossip.demands import check_symmetric
from lightning_decentral.gossip.low_rank import Factors, factors
from lightning_decentral.gossip.plan import Topology
from lightning_decentral.gossip.weights import Weights


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

    def half(self, layout: Layout, turn: int) -> "Half":
        """What is sent of such a message in the turn-th round of a link."""
        return Half(factors(layout, self.rank), transposed=turn % 2 == 1)

    def bytes(self, layout: Layout, dtype: torch.dtype) -> int:
        """Of a payload on the wire, the mean of an even and an odd turn."""
        return sum(self.half(layout, turn).part(dtype).bytes for turn in (0, 1)) // 2


@dataclass(frozen=True)
class Half:
    """A payload: M S [m, rank] of each matrix M [m, c], or M^T S [c, rank], then all that is in none of them."""

    plan: Factors
    transposed: bool

    def part(self, dtype: torch.dtype) -> Part:
        """The payload as a tensor."""
        return Part(self._length(self.transposed) + sum(stop - start for start, stop in self.plan.others), dtype)

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
