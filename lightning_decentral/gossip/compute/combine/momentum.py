"""Quasi-global momentum: it follows where a worker went together with its neighbours."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_decentral.gossip.compute.combine.combine import Recovery, State, Turn
from lightning_decentral.gossip.compute.combine.gossip import Rate, RatedRule, at, check_echo
from lightning_decentral.gossip.plan.stability import RepeatedCorrection
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import Weights
from lightning_decentral.shared.plan.arguments import checked


@checked
@dataclass(frozen=True, kw_only=True)
class QuasiGlobalMomentum(RatedRule):
    """m~ = mu m + g;  x+ = W (x - eta m~);  m+ = mu m + (1 - mu) (x - x+) / eta.

    Kept is M = eta m, a displacement, which nothing divides:  M <- mu M + (1 - mu) (x - x+). Where the learning rate
    falls M falls with it, and all is as the formula has it. Where it rises M stays: what mixing corrects doesn't shrink
    as eta does, and over a rate that nearly vanishes, before a restart, it would be as many times too long.

    m follows the displacement after mixing, which is nearly the same on all workers, where the momentum of an optimizer
    follows a worker's own gradients. With SGD without momentum of its own this is QG-DSGDm. With Adam (first beta 0)
    the same momentum carries Adam's direction, whose second moment is of the worker's own gradients.

    State: x after the last update and m, two copies of the parameters. Bytes: the parameters. A healed worker begins
    with m = 0, as all did: its momentum is back after 1 / (1 - mu) steps.

    Args:
        momentum: mu, in [0, 1).
        rate: towards what was received, as in `Gossip`.

    Raises:
        ValueError: momentum or rate outside of its range.

    Source: Lin et al. 2102.04761, algorithm 1.
    """

    momentum: float = 0.9
    rate: Rate = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}: 0.9 is usual, 0 is Gossip()")

    def check(self, topology: Topology, size: int, weights: Weights, delay: int) -> None:
        super().check(topology, size, weights, delay)
        mu = self.momentum
        echo = RepeatedCorrection(gain=mu * (1 - mu), keep=mu * (2 - mu))
        check_echo("QuasiGlobalMomentum", echo, self.rate, topology, size, weights, delay)

    @property
    def recovery(self) -> Recovery:
        return Recovery(self._begin_anew)

    def init(self, x: Tensor) -> State:
        eta = torch.zeros((), dtype=torch.float64, device=x.device)
        return {"last": x.detach().clone(), "momentum": torch.zeros_like(x), "learning_rate": eta}

    def adapt(self, x: Tensor, state: State, turn: Turn) -> None:
        """x -= mu M;  M takes in the displacement."""
        last, m, mu = state["last"], state["momentum"], self.momentum
        self._follow(state, turn.learning_rate)
        x.sub_(m, alpha=mu)
        # As far as it goes now; the rest when the round lands.
        m.mul_(mu).sub_(x - last, alpha=1 - mu)
        last.copy_(x)
        # Without a rate nothing but mixing moves.
        m.mul_(float(turn.learning_rate > 0))

    def _follow(self, state: State, eta: float) -> None:
        """M <- M min(1, eta / eta of the step before)."""
        if "learning_rate" not in state:  # a checkpoint from before M was kept has m
            state["momentum"].mul_(eta)
            state["learning_rate"] = torch.full((), eta, dtype=torch.float64, device=state["momentum"].device)
        before = state["learning_rate"]
        # On the device, which nobody waits for.
        state["momentum"].mul_((eta / before.clamp(min=1e-300)).clamp(max=1).to(state["momentum"].dtype))
        before.fill_(eta)

    def apply(self, x: Tensor, sent: Tensor, mixed: Tensor, state: State, turn: Turn) -> None:
        correction = mixed.sub_(sent).mul_(at(self.rate, turn))
        x.add_(correction)
        # Not to be counted again as part of the next update.
        state["last"].add_(correction)
        if turn.learning_rate > 0:
            # A correction is a displacement, too.
            state["momentum"].sub_(correction, alpha=1 - self.momentum)
