"""Gossip between pipelines: replicas of a stage mix their parameters (`TokenPipelineStrategy(replicas=...)`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_decentral.gossip.compute.combine.combine import Combine, Rule
from lightning_decentral.gossip.compute.combine.consensus_control import ConsensusControl
from lightning_decentral.gossip.compute.combine.gossip import Gossip
from lightning_decentral.gossip.plan.topology.combined import Auto
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import Weights
from lightning_decentral.gossip.wire.making import MixerFactory, parameters_of
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.gossip.wire.optimizers import Mixers
from lightning_decentral.gossip.wire.overlap import overlapped
from lightning_decentral.gossip.wire.peer import PeerExchange
from lightning_decentral.shared.compute.buckets import pack
from lightning_decentral.shared.compute.layout import ModelLayout, refuse_shared
from lightning_decentral.shared.plan.arguments import Elasticity, at_least, checked
from lightning_decentral.shared.wire.agreement import start_from_worker_0
from lightning_decentral.shared.wire.mean import Swap, mean
from lightning_decentral.shared.wire.meeting.comparison import MakeLayouts, unasked
from lightning_decentral.shared.wire.pipeline_replicas import Bond, Group, Replicas


@checked
@dataclass(frozen=True)
class GossipReplicas(Replicas):
    """x_i+ = sum_j w_ij x_j + u_i over the replicas i of each stage: parameters are mixed, gradients never sent.

    One gossip round follows each update, as under `GossipStrategy`. Copies of one parameter on several stages (tied
    embeddings) stay equal bit for bit.

    Args:
        topology: communication graph by step, whose workers are the replicas.
        combine: update rule: what a replica does with what it received.
        weights: mixing weights of received parameters; by default the rule's.
        delay: updates between sending and mixing; 0 blocks, 1 overlaps a forward and backward.
        elastic: an `Elastic` lets pipelines, each of them one worker, come and go.

    Raises:
        ValueError: for a negative delay; at set-up if topology, rule and delay don't fit together, or
            for a rule that measures the consensus distance (`ConsensusControl`).

    Source: Wang et al. 2410.11998.
    """

    drifts: ClassVar[bool] = True

    topology: Topology = field(default_factory=Auto)
    combine: Rule = field(default_factory=Gossip)
    weights: Weights | None = None
    delay: int = 1
    elastic: Elasticity | None = None

    def __post_init__(self) -> None:
        at_least(0, "0 blocks, 1 overlaps, k mixes k updates later", delay=self.delay)

    def check(self, size: int, per_node: int) -> None:
        if isinstance(self.combine, ConsensusControl):
            raise ValueError(
                f"{self.combine} counts rounds by a distance that each stage measures for itself: copies of a "
                f"parameter on two stages would diverge; use {Gossip()}"
            )
        topology = self.topology.placed(per_node)
        if len(topology.fragments) > 1:
            raise ValueError(f"{topology} splits a model, which stages have split already: use Every(8, Complete())")
        self.combine.placed(topology, size).check(topology, size, self._weights, self.delay)

    def strategy(self, cls: type) -> type:
        return cls if self.elastic is None else self.elastic.strategy(cls)

    @property
    def _weights(self) -> Weights:
        return self.weights or self.combine.weights

    def join(self, group: Group, hosts: Group, device: torch.device, per_node: int) -> Bond:
        return _Mixing(self, group, device, per_node)

    def mixer(self, group: Group, device: torch.device, per_node: int) -> Mixer:
        """Make the mixer of one optimizer, over a new process group. Collective."""
        # No all-reduce in cliques, which would round copies of one parameter on two stages differently.
        topology, over = self.topology.placed(per_node), group()
        exchange = PeerExchange(topology, self._weights, over, device)
        assert isinstance(self.combine, Combine)
        combine = self.combine.placed(topology, over.size)
        return Mixer([], combine, overlapped(exchange, device, self.delay), self.delay)


class _Mixing(Bond):
    def __init__(self, how: GossipReplicas, group: Group, device: torch.device, per_node: int) -> None:
        self._device, self._over = device, group()
        self._optimizers: list[Optimizer] = []
        self._layout = ModelLayout()
        self._mixer = partial(how.mixer, group, device, per_node)
        self._mixers = Mixers(self._making)

    def _making(self) -> MixerFactory:
        alike = partial(start_from_worker_0, over=self._over, device=self._device)
        return MixerFactory(
            lambda: [self._mixer()],
            pack,
            mean=lambda tensors: (mean(tensors, self._over), ""),
            known=self._layout,
            alike=alike,
            meet=self._meet_in_mean,
        )

    def prepare(self, optimizers: Sequence[Optimizer], module: nn.Module, layouts: MakeLayouts = unasked) -> None:
        self._optimizers = list(optimizers)
        parameters = [p for optimizer in optimizers for p in parameters_of(optimizer)]
        refuse_shared(nn.ParameterList(parameters))
        self._layout.note(parameters)
        for optimizer in optimizers:
            self._mixers.adopt(optimizer)
        self._mixers.mixed.watch(module.named_parameters, layouts)

    def gradients(self, own: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """Return this replica's own gradients, after adding parameters unfrozen since the last step to the buckets."""
        for optimizer in self._optimizers:
            self._mixers.adopt(optimizer)
        return super().gradients(own, parameters)

    def updated(self, optimizer: Optimizer, epoch: int) -> None:
        self._mixers.step(optimizer)

    def _meet_in_mean(self, parameters: Sequence[nn.Parameter]) -> None:
        Swap(parameters, mean(parameters, self._over, self.share()))  # never undone

    def settle(self) -> None:
        self._mixers.end()

    def note(self, written: Sequence[Tensor]) -> None:
        self._mixers.note(written)

    def share(self) -> float | None:
        return self._mixers.share(self._over, self._device, lambda call: call())

    def release(self) -> None:
        self._mixers.release()

    def state_dict(self) -> dict[str, Any]:
        return self._mixers.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._mixers.load_state_dict(state, self._optimizers)
