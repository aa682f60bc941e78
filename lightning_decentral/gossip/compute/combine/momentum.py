"""Quasi-global momentum: it follows where a worker went together with its neighbours."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_decentral.gossip.compute.combine.combine import Combine, Rate, State, Turn, at, largest
from lightning_decentral.gossip.compute.combine.rate import check_echo, check_rate
from lightning_decentral.gossip.plan.stability import RepeatedCorrection
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import Weights
from lightning_decentral.shared.plan.arguments import checked


@checked
@dataclass(frozen=True, kw_only=True)
class QuasiGlobalMomentum(Combine):
    """m~ = mu m + g;  x+ = W (x - eta m~);  m+ = mu m + (1 - mu) (x - x+) / eta.

    m follows the displacement after mixing, which is nearly the same on all workers, where the momentum of an optimizer
    follows a worker's own gradients. With SGD without momentum of its own this is QG-DSGDm. With Adam (first beta 0)
    the same momentum carries Adam's direction. QG-DAdam, whose second moment is one of displacements too, is an
    optimizer: `optim.QuasiGlobalAdam` under `Gossip()`.

    State: x after the last update and m, two copies of the parameters. Bytes: the parameters. A healed worker begins
    with m = 0, as all did: its momentum is back after 1 / (1 - mu) steps.

    Args:
        momentum: mu, in [0, 1).
        rate: towards what was heard, as in `Gossip`.

    Raises:
        ValueError: momentum or rate outside of its range.

    Source: Lin et al. 2102.04761, algorithm 1.
    """

    momentum: float = 0.9
    rate: Rate = 1.0

    def __post_init__(self) -> None:
        check_rate(self.rate)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}: 0.9 is usual, 0 is Gossip()")

    @property
    def largest_rate(self) -> float:
        return largest(self.rate)

    def check(self, topology: Topology, size: int, weights: Weights, delay: int) -> None:
        super().check(topology, size, weights, delay)
        mu = self.momentum
        echo = RepeatedCorrection(gain=mu * (1 - mu), keep=mu * (2 - mu))
        check_echo("QuasiGlobalMomentum", echo, self.rate, topology, size, weights, delay)

    def incurable(self, heard: bool = True) -> str:
        return ""

    def tied(self) -> str:
        return ""

    def init(self, x: Tensor) -> State:
        return {"last": x.detach().clone(), "momentum": torch.zeros_like(x)}

    def adapt(self, x: Tensor, state: State, turn: Turn) -> None:
        """x -= eta mu m;  m takes in the displacement."""
        last, m, mu = state["last"], state["momentum"], self.momentum
        x.sub_(m, alpha=turn.learning_rate * mu)
        m.mul_(mu)
        if turn.learning_rate > 0:
            # As far as it goes now; the rest when the round lands.
            m.sub_(x - last, alpha=(1 - mu) / turn.learning_rate)
        last.copy_(x)

    def mixing(self, turn: Turn) -> dict[str, float]:
        return {"mixing_rate": at(self.rate, turn)}

    def apply(self, x: Tensor, sent: Tensor, mixed: Tensor, state: State, turn: Turn) -> None:
        correction = mixed.sub_(sent).mul_(at(self.rate, turn))
        x.add_(correction)
        # Not to be counted again as part of the next update.
        state["last"].add_(correction)
        if turn.learning_rate > 0:
            # A correction is a displacement, too.
            state["momentum"].sub_(correction, alpha=(1 - self.momentum) / turn.learning_rate)
