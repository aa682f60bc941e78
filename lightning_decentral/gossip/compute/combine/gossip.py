"""Gossip averaging: the plain rule, x <- x + rate (mixed - sent). Short on purpose: the example to copy."""

from dataclasses import dataclass

from torch import Tensor

from lightning_decentral.gossip.compute.combine.combine import Combine, Rate, at, largest
from lightning_decentral.gossip.compute.combine.rate import check_rate, check_stable
from lightning_decentral.gossip.compute.combine.rule import State, Turn
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import Weights
from lightning_decentral.shared.plan.arguments import checked


@checked
@dataclass(frozen=True, kw_only=True)
class Gossip(Combine):
    """x <- x + rate * (mixed - sent): decentralized SGD, ATC at delay 0 and AWC at delay 1.

    Args:
        rate: 1 mixes fully; smaller keeps more of the worker's own value and is stable with longer delays. A number or
            a `RateSchedule`.

    Raises:
        ValueError: rate is not in (0, 1].

    Source: Lian et al. 1705.09056; the overlapped order, Wang et al. 2410.11998, eq. 3.
    """

    rate: Rate = 1.0

    def __post_init__(self) -> None:
        check_rate(self.rate)

    @property
    def largest_rate(self) -> float:
        return largest(self.rate)

    def check(self, topology: Topology, size: int, weights: Weights, delay: int) -> None:
        """Doubly stochastic weights, and a rate that is stable with this delay."""
        super().check(topology, size, weights, delay)
        check_stable("Gossip", self.rate, topology, size, weights, delay)

    def mixing(self, turn: Turn) -> dict[str, float]:
        return {"mixing_rate": at(self.rate, turn)}

    def rate_of(self, turn: Turn) -> float | None:
        # Who inherits this rule and writes another `apply` means that one.
        return at(self.rate, turn) if type(self).apply is Gossip.apply else None

    def apply(self, x: Tensor, sent: Tensor, mixed: Tensor, state: State, turn: Turn) -> None:
        x.add_(mixed.sub_(sent), alpha=at(self.rate, turn))
