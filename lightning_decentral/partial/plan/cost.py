"""What a depth costs in compute, memory and traffic, and where to cut so that the pieces balance."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_decentral.shared.plan.linear_partition import linear_partition, piece_sums


@dataclass(frozen=True)
class SegmentCost:
    """Of a piece of the network in a step: seconds of its forward, bytes saved for its backward, parameters' bytes."""

    forward_seconds: float = 0.0
    saved_bytes: int = 0
    parameter_bytes: int = 0

    def __add__(self, other: "SegmentCost") -> "SegmentCost":
        return SegmentCost(
            self.forward_seconds + other.forward_seconds,
            self.saved_bytes + other.saved_bytes,
            self.parameter_bytes + other.parameter_bytes,
        )


def total(costs: Sequence[SegmentCost]) -> SegmentCost:
    """The sum."""
    return sum(costs, SegmentCost())


def compute_fraction(costs: Sequence[SegmentCost], depth: int) -> float:
    """(F + 2 F_top) / (3 F): a worker's compute against a full step, the backward twice the forward's F seconds."""
    forward = total(costs).forward_seconds
    top = total(costs[-depth:]).forward_seconds
    return (forward + 2 * top) / (3 * forward) if forward else 1.0


def memory_fraction(costs: Sequence[SegmentCost], depth: int) -> float:
    """Saved activations of the top `depth` pieces against all."""
    saved = total(costs).saved_bytes
    return total(costs[-depth:]).saved_bytes / saved if saved else 1.0


def sent_bytes(piece_bytes: float, contributors: int, size: int) -> float:
    """(k + n - 2) / n of the piece: mean bytes that a worker sends to average a piece over k contributors of n workers.

    The contributors reduce it to one of them (k - 1 messages), who hands it to all (n - 1 messages); with k = n it is
    the 2 (n - 1) / n of an all-reduce, with no contributor nothing. Over n equal pieces with 1, 2, ..., n contributors
    it sums to exactly 3/4 of a full all-reduce.
    """
    return (contributors + size - 2) / size * piece_bytes if contributors and size > 1 else 0.0


class Balance(ABC):
    """What the pieces of an automatic cut should have equally much of."""

    @abstractmethod
    def of(self, cost: SegmentCost) -> float:
        """The size of a block."""


@dataclass(frozen=True)
class Blocks(Balance):
    """Equally many blocks."""

    def of(self, cost: SegmentCost) -> float:
        """One."""
        return 1.0


@dataclass(frozen=True)
class SavedBytes(Balance):
    """Activations that the backward needs: the same in every run, and about proportional to compute."""

    def of(self, cost: SegmentCost) -> float:
        """Bytes."""
        return float(cost.saved_bytes)


@dataclass(frozen=True)
class Seconds(Balance):
    """Measured seconds of the forward: as good as the clock, so cuts may differ from run to run."""

    def of(self, cost: SegmentCost) -> float:
        """Seconds."""
        return cost.forward_seconds


@dataclass(frozen=True)
class Parameters(Balance):
    """Bytes of the parameters: what travels."""

    def of(self, cost: SegmentCost) -> float:
        """Bytes."""
        return float(cost.parameter_bytes)


def partition(sizes: Sequence[float], pieces: int) -> list[int]:
    """Starts of the second to last of `pieces` contiguous, non-empty pieces whose largest sum is as small as possible.

    Among equally good ones, the least sum of squares.
    """
    at = linear_partition(piece_sums(sizes) ** 2, pieces)
    assert at is not None  # whoever asks has as many blocks
    return list(at[1:-1])
