"""Momentum from where all workers together go."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_decentral.gossip.combine.rate import Rate, at, check_rate, largest
from lightning_decentral.gossip.combine.rule import Combine, State, Turn
from lightning_decentral.gossip.combine.stable import check_echo
from lightning_decentral.gossip.stability import Echo
from lightning_decentral.gossip.topology import Topology
from lightning_decentral.gossip.weights import Weights


@dataclass(frozen=True, kw_only=True)
class QuasiGlobalMomentum(Combine):
    """m~ = mu m + g;  x+ = W (x - eta m~);  m+ = mu m + (1 - mu) (x - x+) / eta.

    m follows the displacement after mixing, which is nearly the same on all workers, where the momentum of an optimizer
    follows a worker's own gradients. With SGD without momentum of its own this is QG-DSGDm. With Adam (first beta 0)
    the same momentum carries Adam's direction. QG-DAdam, whose second moment is one of displacements too, is an
    optimizer: `optim.QuasiGlobalAdam` under `Gossip()`.

    State: x after the last update and m, two copies of the parameters. Bytes: the parameters.

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
        """Of the rate."""
        return largest(self.rate)

    def check(self, topology: Topology, size: int, weights: Weights, delay: int) -> None:
        """Doubly stochastic weights, and corrections that the momentum repeats without growing."""
        super().check(topology, size, weights, delay)
        mu = self.momentum
        echo = Echo(gain=mu * (1 - mu), keep=mu * (2 - mu))
        check_echo("QuasiGlobalMomentum", echo, self.rate, topology, size, weights, delay)

    def init(self, x: Tensor) -> State:
        """m = 0."""
        return {"last": x.detach().clone(), "momentum": torch.zeros_like(x)}

    def adapt(self, x: Tensor, state: State, turn: Turn) -> None:
        """x -= eta mu m; the displacement so far goes into m, the rest when the round lands."""
        last, m, mu = state["last"], state["momentum"], self.momentum
        x.sub_(m, alpha=turn.learning_rate * mu)
        m.mul_(mu)
        if turn.learning_rate > 0:
            m.sub_(x - last, alpha=(1 - mu) / turn.learning_rate)
        last.copy_(x)

    def mixing(self, turn: Turn) -> dict[str, float]:
        """The rate."""
        return {"mixing_rate": at(self.rate, turn)}

    def apply(self, x: Tensor, sent: Tensor, mixed: Tensor, state: State, turn: Turn) -> None:
        """x += rate * (mixed - sent), which is a displacement too."""
        correction = mixed.sub_(sent).mul_(at(self.rate, turn))
        x.add_(correction)
        state["last"].add_(correction)
        if turn.learning_rate > 0:
            state["momentum"].sub_(correction, alpha=(1 - self.momentum) / turn.learning_rate)
