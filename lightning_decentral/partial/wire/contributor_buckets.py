"""Bucket layout of partial gradients: which travel together, neighbours in backward with the same contributors."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_decentral.shared.compute.buckets import bucket_bytes_of, chunked
from lightning_decentral.shared.wire.gradients import GradientBucket, pack

Kind = tuple[torch.dtype, torch.device]
Ranks = tuple[int, ...]


class ContributorBucket(GradientBucket):
    """Gradients with the same contributors.

    Args:
        flat: [elements of the gradients], for this backward.
    """

    def __init__(self, ranks: Ranks, parameters: Sequence[nn.Parameter], flat: Tensor) -> None:
        super().__init__(parameters)
        self.ranks, self.flat = ranks, flat
        self.bytes = flat.numel() * flat.element_size()

    def pack(self, weight: float) -> None:
        """weight * gradient, zeros where there is none."""
        pack(self.gradients, self.parameters, self.flat)
        self.flat.mul_(weight)

    def land(self, used: Sequence[int]) -> None:
        """Wait; then into `.grad` of every parameter for which some worker had a gradient."""
        if self.pending is not None:
            self.pending.wait()  # on a device the stream does
        self.store(self.flat, used)


@dataclass
class _Row:
    """Parameters that will share a bucket, their contributors, and the place of the last of them in backward."""

    ranks: Ranks
    parameters: list[nn.Parameter]
    place: int

    @property
    def elements(self) -> int:
        return sum(p.numel() for p in self.parameters)


class Packing:
    """Parameters in the order of backward, each at its place in one tensor for each type and device.

    Args:
        segments: trained parameters of each segment from the bottom.
        bucket_bytes: of a bucket at most, unless one parameter is larger; by default `bucket_bytes_of` them.
    """

    def __init__(self, segments: Sequence[Sequence[nn.Parameter]], bucket_bytes: int | None) -> None:
        self._most = bucket_bytes or bucket_bytes_of(p for segment in segments for p in segment)
        self._pieces = [  # never split; the last parameters first, as backward meets them
            (segment, members)
            for segment in reversed(range(len(segments)))
            for members in chunked(reversed(segments[segment]), self._most)
        ]
        self._stores: dict[Kind, Tensor] = {}

    def buckets(self, contributors: Sequence[Ranks]) -> list[ContributorBucket]:
        """Buckets in the order in which backward completes them; what nobody contributes to is in none."""
        kinds: dict[Kind, list[_Row]] = {}
        for place, (segment, members) in enumerate(self._pieces):
            if contributors[segment]:
                piece = _Row(contributors[segment], members, place)
                self._join(kinds.setdefault((members[0].dtype, members[0].device), []), piece)
        found: list[tuple[int, ContributorBucket]] = []
        for kind, rows in kinds.items():
            flats = self._store(kind, sum(row.elements for row in rows)).split([row.elements for row in rows])
            buckets = [ContributorBucket(row.ranks, row.parameters, f) for row, f in zip(rows, flats, strict=True)]
            found += zip([row.place for row in rows], buckets, strict=True)
        return [bucket for _, bucket in sorted(found, key=lambda pair: pair[0])]

    def _join(self, rows: list[_Row], piece: _Row) -> None:
        """Join the piece to the last row where it has room for it, otherwise as a row of its own."""
        # Segments share a bucket: a message for each would cost a worker more than its bytes do.
        both = _Row(piece.ranks, [*(rows[-1].parameters if rows else []), *piece.parameters], piece.place)
        room = both.elements * piece.parameters[0].element_size() <= self._most
        if rows and rows[-1].ranks == piece.ranks and room:
            rows[-1] = both
        else:
            rows.append(piece)

    def _store(self, kind: Kind, elements: int) -> Tensor:
        # As large as was needed so far: contributors, and with them the sizes, change from step to step.
        if kind not in self._stores or self._stores[kind].numel() < elements:
            self._stores[kind] = torch.empty(elements, dtype=kind[0], device=kind[1])
        return self._stores[kind][:elements]
