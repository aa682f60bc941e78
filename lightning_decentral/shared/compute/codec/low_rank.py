"""Low-rank compression: the matrices of a message as products of two factors, and where these lie in a payload."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from lightning_decentral.shared.compute.buckets import Matrix
from lightning_decentral.shared.compute.codec.codec import Codec, Frame, MessageLayout, Payload, PayloadPart
from lightning_decentral.shared.compute.codec.counter_rng import uniform
from lightning_decentral.shared.plan.arguments import checked


@dataclass(frozen=True)
class Factors:
    """left [rows, rank] and right [rank, columns] for each matrix in turn, then all that is in none of them."""

    rank: int
    matrices: tuple[Matrix, ...]
    others: tuple[tuple[int, int], ...]

    @property
    def elements(self) -> int:
        return self._of_matrices() + sum(stop - start for start, stop in self.others)

    def _of_matrices(self) -> int:
        return self.rank * sum(m.rows + m.columns for m in self.matrices)

    def views(self, message: Tensor, payload: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(matrix, left, right), views of message and payload."""
        at = 0
        for offset, rows, columns in self.matrices:
            middle, end = at + rows * self.rank, at + (rows + columns) * self.rank
            matrix = message[offset : offset + rows * columns].view(rows, columns)
            yield matrix, payload[at:middle].view(rows, self.rank), payload[middle:end].view(self.rank, columns)
            at = end

    def rest(self, message: Tensor, payload: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(part of the message outside of the matrices, its place in the payload)."""
        at = self._of_matrices()
        for start, stop in self.others:
            yield message[start:stop], payload[at : at + stop - start]
            at += stop - start


@lru_cache(maxsize=256)
def factors(layout: MessageLayout, rank: int) -> Factors:
    """The matrices that factors make smaller, and what lies between them."""
    matrices = tuple(m for m in layout.matrices if rank * (m.rows + m.columns) < m.rows * m.columns)
    ends = [m.offset + m.rows * m.columns for m in matrices]
    gaps = zip([0, *ends], [*(m.offset for m in matrices), layout.length], strict=True)
    return Factors(rank, matrices, tuple((start, stop) for start, stop in gaps if start < stop))


def orthonormal(columns: Tensor) -> Tensor:
    """An orthonormal basis of the columns; NaN where they hold NaN or infinity."""
    finite: Tensor = torch.isfinite(columns).all()
    # In double precision: where two workers each find a basis of the same nearly dependent columns, their
    # libraries may round differently, and what differs is far below what the messages round.
    basis: Tensor = torch.linalg.qr(columns.where(finite, 0).double()).Q
    return basis.to(columns.dtype).where(finite, torch.nan)


@checked
@dataclass(frozen=True, kw_only=True)
class LowRank(Codec):
    """decoded = P P^T M for each matrix M [m, c] of the message;  P [m, rank] = orthonormal(M S), S [c, rank] random.

    Sent are P and P^T M: rank (m + c) elements for m c. Vectors, and matrices that are no larger than that, are sent as
    they are. Of a message only part arrives, so this codes differences: wrap it. The difference is that from what the
    hearer knows already, which needs no answer from it, so directed graphs are served, too.

    Args:
        rank: columns of P.

    Raises:
        ValueError: rank is below 1.

    Source: one step of subspace iteration as in Vogels et al. 1905.13727 (PowerSGD), without its warm start: what was
    just sent is missing from the difference, so the next one wants other directions.
    """

    complete = whole = False
    of_matrices = True
    rank: int = 4

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"LowRank's rank must be at least 1, got {self.rank}: 1 to 8 are usual")

    def parts(self, layout: MessageLayout, dtype: torch.dtype) -> tuple[PayloadPart, ...]:
        """One tensor: P and P^T M of each matrix, then the rest."""
        return (PayloadPart(factors(layout, self.rank).elements, dtype),)

    def encode(self, message: Tensor, payload: Payload, frame: Frame) -> None:
        plan = factors(frame.layout, self.rank)
        for place, (matrix, left, right) in enumerate(plan.views(message, payload[0])):
            exact = matrix if matrix.dtype == torch.float64 else matrix.float()
            # Other directions for each matrix of a message.
            start = uniform(exact.shape[1], self.rank, frame.key + 31 * place, exact)
            basis = orthonormal(exact @ start)
            left.copy_(basis)
            right.copy_(basis.T @ exact)
        for rest, sent in plan.rest(message, payload[0]):
            sent.copy_(rest)

    def decode(self, payload: Payload, out: Tensor, frame: Frame) -> None:
        plan = factors(frame.layout, self.rank)
        for matrix, left, right in plan.views(out, payload[0]):
            torch.mm(left, right, out=matrix)
        for rest, sent in plan.rest(out, payload[0]):
            rest.copy_(sent)
