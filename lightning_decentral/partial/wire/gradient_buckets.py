"""Bucket layout of partial gradients: which travel together, neighbours in backward with the same contributors."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_decentral.shared.compute.buckets import bucket_bytes_of, chunked
from lightning_decentral.shared.wire.gradient_bucket import GradientBucket, flag, pack, used
from lightning_decentral.shared.wire.pending import Together

Kind = tuple[torch.dtype, torch.device]


@dataclass(frozen=True, eq=False)
class Piece:
    """Parameters of one segment, one type, one device: what is never taken apart."""

    segment: int
    parameters: tuple[nn.Parameter, ...]

    @property
    def kind(self) -> Kind:
        """Type and device."""
        return self.parameters[0].dtype, self.parameters[0].device

    @property
    def numel(self) -> int:
        """Elements of the gradients and of their flags."""
        return sum(p.numel() for p in self.parameters) + len(self.parameters)

    @property
    def bytes(self) -> int:
        """Of the same."""
        return self.numel * self.parameters[0].element_size()


class ContributorBucket(GradientBucket):
    """Gradients with the same contributors, the flags behind them in the same message.

    Args:
        flat: [elements of the gradients, flags], for this backward.
    """

    def __init__(self, ranks: tuple[int, ...], pieces: Sequence[Piece], flat: Tensor) -> None:
        super().__init__([p for piece in pieces for p in piece.parameters])
        self.ranks, self.flat = ranks, flat
        self.bytes = flat.numel() * flat.element_size()
        self._sums, self._flags = flat.split([self.elements, len(self.parameters)])

    def pack(self, weight: float) -> None:
        """weight * gradient, zeros where there is none; and the flags."""
        pack(self.gradients, self.parameters, self._sums)
        self._sums.mul_(weight)
        flag(self.gradients, self._flags)

    def land(self) -> None:
        """Wait; then into `.grad` of every parameter for which some worker had a gradient."""
        pending = self.pending or Together([])
        pending.wait()
        self.store(self._sums, used(self.gradients, self._flags, pending))


class Packing:
    """Pieces in the order of backward, each at its place in one tensor for each type and device.

    Args:
        segments: trained parameters of each segment from the bottom.
        bucket_bytes: of a bucket at most, unless one parameter is larger; by default `bucket_bytes_of` them.
    """

    def __init__(self, segments: Sequence[Sequence[nn.Parameter]], bucket_bytes: int | None) -> None:
        self._most = bucket_bytes or bucket_bytes_of(p for segment in segments for p in segment)
        self.pieces = [
            Piece(index, tuple(members))
            for index in reversed(range(len(segments)))
            for members in chunked(reversed(segments[index]), self._most)  # the last first, as backward meets them
        ]
        self._stores: dict[Kind, Tensor] = {}

    def buckets(self, contributors: Sequence[tuple[int, ...]]) -> list[ContributorBucket]:
        """In the order in which backward completes them; what nobody contributes to is in none.

        Segments share a bucket as far as it has room: a message for each would cost a worker more than its bytes do.
        """
        last: dict[ContributorBucket, int] = {}
        trained = [piece for piece in self.pieces if contributors[piece.segment]]
        for kind in dict.fromkeys(piece.kind for piece in trained):
            rows = self._joined([piece for piece in trained if piece.kind == kind], contributors)
            sizes = [sum(piece.numel for piece in row) for row in rows]
            flats = self._store(kind, sum(sizes)).split(sizes)
            for row, flat in zip(rows, flats, strict=True):
                last[ContributorBucket(contributors[row[0].segment], row, flat)] = self.pieces.index(row[-1])
        return sorted(last, key=lambda bucket: last[bucket])

    def _joined(self, pieces: Sequence[Piece], contributors: Sequence[tuple[int, ...]]) -> list[list[Piece]]:
        rows: list[list[Piece]] = []
        for piece in pieces:
            last = rows[-1] if rows else []
            alike = bool(last) and contributors[last[0].segment] == contributors[piece.segment]
            if alike and sum(p.bytes for p in last) + piece.bytes <= self._most:
                last.append(piece)
            else:
                rows.append([piece])
        return rows

    def _store(self, kind: Kind, numel: int) -> Tensor:
        """As large as was needed so far."""
        if kind not in self._stores or self._stores[kind].numel() < numel:
            dtype, device = kind
            self._stores[kind] = torch.empty(numel, dtype=dtype, device=device)
        return self._stores[kind][:numel]
