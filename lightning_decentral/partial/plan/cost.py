"""Cost of partial backprop by depth: compute, memory and gradient traffic; balanced cuts of a network."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_decentral.shared.plan.profile import BlockCost


def compute_fraction(costs: Sequence[BlockCost], depth: int) -> float:
    """Fraction of a full step's compute: (F + 2 F_top) / (3 F), with a backward twice the forward's F seconds."""
    lowest = len(costs) - depth
    return selected_fraction(costs, range(lowest, len(costs)), lowest)


def selected_fraction(costs: Sequence[BlockCost], trained: Sequence[int], lowest: int) -> float:
    """Fraction of a full step's compute: (F + F_passed + F_trained) / (3 F). Gradients of inputs are computed from the
    lowest segment up, gradients of weights for trained segments; each takes as long as the forward."""
    forward, passed = _seconds(costs), _seconds(costs[lowest:])
    own = _seconds([costs[piece] for piece in trained])
    return (forward + passed + own) / (3 * forward) if forward else 1.0


def _seconds(costs: Sequence[BlockCost]) -> float:
    return sum(cost.forward_seconds for cost in costs)


def memory_fraction(costs: Sequence[BlockCost], depth: int) -> float:
    """Saved activations of the top `depth` pieces, as a fraction of all saved activations."""
    saved = saved_bytes(costs)
    return saved_bytes(costs[-depth:]) / saved if saved else 1.0


def saved_bytes(costs: Sequence[BlockCost]) -> int:
    return sum(cost.saved_bytes for cost in costs)


class Balance(ABC):
    """Quantity that the pieces of an automatic cut should share equally."""

    @abstractmethod
    def of(self, cost: BlockCost) -> float:
        """Size of a block in this quantity."""


@dataclass(frozen=True)
class Blocks(Balance):
    """Number of blocks."""

    def of(self, cost: BlockCost) -> float:
        return 1.0


@dataclass(frozen=True)
class SavedBytes(Balance):
    """Bytes of activations saved for the backward: the same in every run, and roughly proportional to compute."""

    def of(self, cost: BlockCost) -> float:
        return float(cost.saved_bytes)


@dataclass(frozen=True)
class Seconds(Balance):
    """Measured seconds of the forward: as noisy as the clock, so cuts may differ from run to run."""

    def of(self, cost: BlockCost) -> float:
        return cost.forward_seconds


@dataclass(frozen=True)
class Parameters(Balance):
    """Bytes of the parameters, and so of the gradients that are sent."""

    def of(self, cost: BlockCost) -> float:
        return float(cost.parameter_bytes)
