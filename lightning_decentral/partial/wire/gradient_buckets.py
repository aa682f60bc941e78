"""Which gradients travel together: neighbours in backward to which the same workers contribute."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_decentral.shared.compute.buckets import bucket_bytes_of
from lightning_decentral.shared.wire.pending import Pending

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


class GradientBucket:
    """Gradients in one tensor, one flag for each behind them, all with the same contributors.

    The flags add up to how many workers have a gradient: where none has, none is made up.

    Args:
        flat: [elements of the pieces], for this backward.
    """

    def __init__(self, ranks: tuple[int, ...], pieces: Sequence[Piece], flat: Tensor) -> None:
        self.ranks, self.flat = ranks, flat
        self.parameters = [p for piece in pieces for p in piece.parameters]
        self.waiting = set(self.parameters)
        self.pending: Pending | None = None
        self.bytes = flat.numel() * flat.element_size()

    def pack(self, weight: float) -> None:
        """weight * gradient, zeros where there is none; and the flags."""
        *views, flags = self._views()
        for parameter, view in zip(self.parameters, views, strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                torch.mul(_dense(parameter.grad), weight, out=view)
        flags.fill_(1.0)
        for index in [i for i, p in enumerate(self.parameters) if p.grad is None]:
            flags[index] = 0.0

    def unpack(self) -> None:
        """Into `.grad` of every parameter for which some worker had a gradient."""
        *views, flags = self._views()
        complete = all(p.grad is not None for p in self.parameters)  # then the flags needn't be fetched
        some = [True] * len(views) if complete else [bool(flag) for flag in flags.tolist()]
        for parameter, view, used in zip(self.parameters, views, some, strict=True):
            if parameter.grad is not None and not parameter.grad.is_sparse:
                parameter.grad.copy_(view)
            elif used:
                parameter.grad = torch.empty_like(parameter).copy_(view)

    def _views(self) -> list[Tensor]:
        *parts, flags = self.flat.split([*(p.numel() for p in self.parameters), len(self.parameters)])
        return [*(part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)), flags]


class Packing:
    """Pieces in the order of backward, each at its place in one tensor for each type and device.

    Args:
        segments: trained parameters of each segment from the bottom.
        bucket_bytes: of a bucket at most, unless one parameter is larger; by default `bucket_bytes_of` them.
    """

    def __init__(self, segments: Sequence[Sequence[nn.Parameter]], bucket_bytes: int | None) -> None:
        self._most = bucket_bytes or bucket_bytes_of(p for segment in segments for p in segment)
        self.pieces = [piece for s in reversed(range(len(segments))) for piece in self._pieces(s, segments[s])]
        self._stores: dict[Kind, Tensor] = {}

    def _pieces(self, segment: int, parameters: Sequence[nn.Parameter]) -> list[Piece]:
        """The last parameters first, as backward meets them."""
        chunks: dict[Kind, list[list[nn.Parameter]]] = {}
        room: dict[Kind, int] = {}
        for parameter in reversed(list(parameters)):
            kind, size = (parameter.dtype, parameter.device), parameter.numel() * parameter.element_size()
            if room.get(kind, -1) < size:
                chunks.setdefault(kind, []).append([])
                room[kind] = self._most
            chunks[kind][-1].append(parameter)
            room[kind] -= size
        return [Piece(segment, tuple(members)) for rows in chunks.values() for members in rows]

    def buckets(self, contributors: Sequence[tuple[int, ...]]) -> list[GradientBucket]:
        """In the order in which backward completes them; what nobody contributes to is in none.

        Segments share a bucket as far as it has room: a message for each would cost a worker more than its bytes do.
        """
        last: dict[GradientBucket, int] = {}
        trained = [piece for piece in self.pieces if contributors[piece.segment]]
        for kind in dict.fromkeys(piece.kind for piece in trained):
            rows = self._joined([piece for piece in trained if piece.kind == kind], contributors)
            sizes = [sum(piece.numel for piece in row) for row in rows]
            flats = self._store(kind, sum(sizes)).split(sizes)
            for row, flat in zip(rows, flats, strict=True):
                last[GradientBucket(contributors[row[0].segment], row, flat)] = self.pieces.index(row[-1])
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


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient
