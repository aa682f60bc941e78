"""Momentum rules: quasi-global momentum, and outer momentum after local steps (DiLoCo, NoLoCo)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_decentral.gossip.compute.combine.combine import Combine, Rate, State, Turn, at, largest
from lightning_decentral.gossip.compute.combine.rate import check_echo, check_rate
from lightning_decentral.gossip.plan.checks import check_one_flight
from lightning_decentral.gossip.plan.stability import RepeatedCorrection
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import Weights
from lightning_decentral.shared.plan.arguments import checked


@checked
@dataclass(frozen=True, kw_only=True)
class Outer(Combine):
    """m <- momentum m + (mixed - anchor);  anchor <- anchor + lr m;  x <- x + (anchor - sent).

    anchor_i is where worker i last began; mixed - anchor_i = mean of (x_j - anchor_j) - (anchor_i - mean of anchor_j):
    the way that the ones heard went together, and the pull towards them. Local steps come from the topology: over
    `Every(H, RandomMatching())` this is NoLoCo (with its gamma = beta = lr, as in its published code). Overlapped, x
    keeps what it learnt while the message was under way. A worker without a partner takes no outer step.

    State: anchor and m, two copies of the parameters. Bytes: the parameters, in every H-th step. A healed worker begins
    at its neighbours' parameters, with that anchor and without momentum: no sum over the workers depends on either.

    Args:
        lr: of the outer step, in (0, 1].
        momentum: of the outer step, in [0, 1).

    Raises:
        ValueError: lr or momentum outside of its range; at set-up, where a message would leave before the last landed.

    Source: Kolehmainen et al. 2506.10911.
    """

    lr: float = 0.7
    momentum: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.lr <= 1:
            raise ValueError(f"the outer lr must be in (0, 1], got {self.lr}: 0.7 is usual, 1 takes the whole way")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"the outer momentum must be in [0, 1), got {self.momentum}: 0 is Gossip(rate=lr)")

    def check(self, topology: Topology, size: int, weights: Weights, delay: int) -> None:
        super().check(topology, size, weights, delay)
        check_one_flight(type(self).__name__, topology, size, delay)

    def incurable(self, topology: Topology, size: int, weights: Weights) -> str:
        return ""

    def init(self, x: Tensor) -> State:
        return {"anchor": x.detach().clone(), "momentum": torch.zeros_like(x)}

    def apply(self, x: Tensor, sent: Tensor, mixed: Tensor, state: State, turn: Turn) -> None:
        anchor, m = state["anchor"], state["momentum"]
        # 0 for who heard itself only and takes no outer step: a factor serves a worker and the rows of a
        # simulation.
        together = (turn.own() < 1).to(x)
        way = mixed.sub_(anchor).mul_(together)
        m.mul_(1 - together * (1 - self.momentum)).add_(way)
        anchor.add_(self._step(m, way).mul_(together), alpha=self.lr)
        x.add_((anchor - sent).mul_(together))

    def _step(self, m: Tensor, way: Tensor) -> Tensor:
        # A copy: the caller scales it in place.
        return m.clone()


@checked
@dataclass(frozen=True, kw_only=True)
class OuterNesterov(Outer):
    """m <- momentum m + (mixed - anchor);  anchor <- anchor + lr (mixed - anchor + momentum m);  x as in `Outer`.

    Over `Every(H, Complete())` all anchors are one and this is DiLoCo, Nesterov's momentum as torch's SGD has it.

    Source: Douillard et al. 2311.08105, algorithm 1.
    """

    momentum: float = 0.9

    def _step(self, m: Tensor, way: Tensor) -> Tensor:
        return way.add(m, alpha=self.momentum)


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

    def incurable(self, topology: Topology, size: int, weights: Weights) -> str:
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
