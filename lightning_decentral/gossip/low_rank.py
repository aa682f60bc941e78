"""Where the factors of a message's matrices lie in a payload."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from lightning_decentral.buckets import Matrix
from lightning_decentral.gossip.coding import Layout


@dataclass(frozen=True)
class Factors:
    """left [rows, rank] and right [rank, columns] for each matrix in turn, then all that is in none of them."""

    rank: int
    matrices: tuple[Matrix, ...]
    others: tuple[tuple[int, int], ...]

    @property
    def elements(self) -> int:
        """Of the payload."""
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
def factors(layout: Layout, rank: int) -> Factors:
    """The matrices that factors make smaller, and what lies between them."""
    matrices = tuple(m for m in layout.matrices if rank * (m.rows + m.columns) < m.rows * m.columns)
    ends = [m.offset + m.rows * m.columns for m in matrices]
    gaps = zip([0, *ends], [*(m.offset for m in matrices), layout.length], strict=True)
    return Factors(rank, matrices, tuple((start, stop) for start, stop in gaps if start < stop))


def orthonormal(columns: Tensor) -> Tensor:
    """An orthonormal basis of the columns; NaN where they hold NaN or infinity.

    In double precision: where two workers each find a basis of the same nearly dependent columns, their libraries may
    round differently, and what differs is far below what the messages round.
    """
    finite: Tensor = torch.isfinite(columns).all()
    basis: Tensor = torch.linalg.qr(columns.where(finite, 0).double()).Q
    return basis.to(columns.dtype).where(finite, torch.nan)
