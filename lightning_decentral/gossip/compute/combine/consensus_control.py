"""Consensus control: adapts the number of gossip rounds per step to the distance between the workers."""

from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from lightning_decentral.gossip.compute.combine.combine import Combine, MessageForm, Recovery, Rule, Turn
from lightning_decentral.gossip.compute.combine.gossip import Gossip
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import Weights
from lightning_decentral.shared.compute.health import squared_norm
from lightning_decentral.shared.plan.arguments import at_least, checked


@checked
@dataclass(frozen=True, kw_only=True)
class ConsensusControl(Rule):
    """Takes `most` rounds per step while theta > target, else none, except for one round in every `probe` steps.

        theta^2 = sum_i ||mixed_i - sent_i||^2 / sum_i ||sent_i||^2     over those that received a message

    theta is measured on the messages that are mixed anyway. With symmetric W, theta / (1 - lambda_n) <= Xi / ||x|| <=
    theta / (1 - lambda_2): on a well connected graph theta is nearly the relative consensus distance. An all-reduce of
    16 bytes for the two sums starts after a step and is read `lag` steps later: no worker waits unless another worker
    is `lag` steps behind. Only the first round of a step overlaps with computation; further rounds block.

    State and bytes: the inner rule's, once for each round. `ConsensusControl` wraps a rule and counts its rounds; the
    mixer `wire.consensus.ControlledMixer` takes the rounds.

    Args:
        target: relative distance above which to mix more; positive.
        most: rounds per step above the target, at least 1.
        probe: steps per round below the target, to measure; 1 takes one round in each step.
        lag: steps between a measurement and the decision by it, at least 1.
        inner: update rule of each round.

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
        at_least(1, "leave it out for the default", most=self.most, probe=self.probe, lag=self.lag)

    @property
    def weights(self) -> Weights:
        return self.inner.weights

    @property
    def form(self) -> MessageForm:
        return self.inner.form

    @property
    def recovery(self) -> Recovery:
        return replace(self.inner.recovery, tied="all workers measure their distance together")

    @property
    def largest_rate(self) -> float:
        return self.inner.largest_rate

    def placed(self, topology: Topology, size: int) -> Self:
        return replace(self, inner=self.inner.placed(topology, size))

    def check(self, topology: Topology, size: int, weights: Weights, delay: int) -> None:
        self.inner.check(topology, size, weights, delay)

    def measure(self, sent: Tensor, mixed: Tensor, turn: Turn) -> Tensor:
        """Return (||mixed - sent||^2, ||sent||^2) of the parameters, over all workers in a simulation."""
        # A worker that received nothing would only make the distance look smaller.
        receives = (turn.own() < 1).to(sent)  # (); in a simulation (size, 1)
        before, after = self.inner.values(sent) * receives, self.inner.values(mixed) * receives
        return torch.stack([squared_norm([t]) for t in (after - before, before)])  # (2,), float64

    def rounds(self, distance: float, idle: int) -> int:
        """Number of rounds to take in this step: `most` above the target, 1 if a probe is due, else 0.

        Args:
            distance: sqrt(squared distance / squared norm) of all workers, `lag` steps ago; nan before the first.
            idle: number of steps since the last step with a round.
        """
        # False for nan, before anything was measured.
        if distance > self.target:
            return self.most
        return 1 if idle + 1 >= self.probe else 0
