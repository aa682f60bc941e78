"""Consensus control: as many rounds in a step as the distance between the workers asks for."""

from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from lightning_decentral.gossip.compute.combine.combine import Combine, MessageForm, Recovery, Rule, Turn
from lightning_decentral.gossip.compute.combine.gossip import Gossip
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import Weights
from lightning_decentral.shared.compute.health import squared_norm
from lightning_decentral.shared.plan.arguments import checked


@checked
@dataclass(frozen=True, kw_only=True)
class ConsensusControl(Rule):
    """`most` rounds in a step while theta > target, none else, but one at least in every `probe` steps.

        theta^2 = sum_i ||mixed_i - sent_i||^2 / sum_i ||sent_i||^2     over those that received a message

    theta is measured where mixing happens anyway. With symmetric W, theta / (1 - lambda_n) <= Xi / ||x|| <= theta /
    (1 - lambda_2): on a well connected graph it is nearly the relative consensus distance. Its two sums travel as 16
    bytes in an all-reduce that starts after a step and is read `lag` steps later: nobody waits for it unless another is
    `lag` steps behind. Rounds beyond the first in a step block: there is nothing to hide them behind.

    State and bytes: the inner rule's, once for each round. No rule itself, but what counts the rounds of one: it stands
    where a rule does, and a mixer of its own takes the rounds (`wire.consensus.ControlledMixer`).

    Args:
        target: relative distance above which to mix more; positive.
        most: rounds in a step above the target, at least 1.
        probe: under the target one round in so many steps, to measure; 1 takes one in each step.
        lag: steps between a measurement and what is decided by it, at least 1.
        inner: the rule of each round.

    Raises:
        ValueError: a number outside of its range.

    Source: Kong et al., Consensus control for decentralized deep learning, ICML 2021, with a relative target.
    """

    target: float
    most: int = 4
    probe: int = 10
    lag: int = 2
    inner: Combine = field(default_factory=Gossip)

    def __post_init__(self) -> None:
        if self.target <= 0:
            raise ValueError(f"the target distance must be positive, got {self.target}: 0.01 is 1 % of the parameters")
        for name in ("most", "probe", "lag"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"ConsensusControl's {name} must be at least 1, got {getattr(self, name)}: "
                    "leave it out for the default"
                )

    @property
    def weights(self) -> Weights:
        return self.inner.weights

    @property
    def form(self) -> MessageForm:
        return self.inner.form

    @property
    def recovery(self) -> Recovery:
        return replace(self.inner.recovery, tied="all workers together measure how far apart they are")

    @property
    def largest_rate(self) -> float:
        return self.inner.largest_rate

    def placed(self, topology: Topology, size: int) -> Self:
        return replace(self, inner=self.inner.placed(topology, size))

    def check(self, topology: Topology, size: int, weights: Weights, delay: int) -> None:
        self.inner.check(topology, size, weights, delay)

    def measure(self, sent: Tensor, mixed: Tensor, turn: Turn) -> Tensor:
        """(||mixed - sent||^2, ||sent||^2) of the parameters, over all workers in a simulation."""
        # A worker that received nothing would only make the distance look smaller.
        listens = (turn.own() < 1).to(sent)  # (); in a simulation (size, 1)
        said, heard = self.inner.values(sent) * listens, self.inner.values(mixed) * listens
        return torch.stack([squared_norm([t]) for t in (heard - said, said)])  # (2,), float64

    def rounds(self, distance: float, idle: int) -> int:
        """Number of rounds to take in this step: `most`, 1 where a probe is due, else 0.

        Args:
            distance: sqrt(squared distance / squared norm) of all workers, `lag` steps ago; nan before the first.
            idle: steps since the last one with a round.
        """
        # False for nan, before anything was measured.
        if distance > self.target:
            return self.most
        return 1 if idle + 1 >= self.probe else 0
