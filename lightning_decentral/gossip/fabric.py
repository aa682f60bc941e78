"""Gossip strategy for Lightning Fabric, `Fabric(strategy="gossip")`, made of the parts of `GossipStrategy`."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_decentral.gossip.compute.combine.combine import Rule, refuse_lossy
from lightning_decentral.gossip.compute.combine.gossip import Gossip
from lightning_decentral.gossip.compute.travel import Travel
from lightning_decentral.gossip.island import Island, Solo
from lightning_decentral.gossip.mixer_builder import MixerBuilder, check_numbers, place
from lightning_decentral.gossip.plan.topology.combined import Auto
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import Weights
from lightning_decentral.gossip.summary import introduced
from lightning_decentral.gossip.wire.consensus import Consensus, spread
from lightning_decentral.gossip.wire.exchange import Traffic
from lightning_decentral.gossip.wire.island_member import IslandMember
from lightning_decentral.gossip.wire.making import MixerFactory
from lightning_decentral.gossip.wire.optimizers import Mixers
from lightning_decentral.shared.compute.codec.codec import Codec, Plain
from lightning_decentral.shared.compute.layout import refuse_shared
from lightning_decentral.shared.fabric.strategy import FabricWorkers
from lightning_decentral.shared.plan.arguments import checked
from lightning_decentral.shared.updates import BeforeUpdate
from lightning_decentral.shared.wire.mean import Swap


@checked
class FabricGossipStrategy(FabricWorkers):
    """x_i+ = sum_j w_ij x_j + u_i, as in `GossipStrategy`, where the user's own loop calls `optimizer.step()`.

    Each optimizer step runs one gossip round. The backward pass sends nothing: gradients stay this worker's own, with
    or without `fabric.no_backward_sync`. Every worker must take the same number of steps.

    Args:
        topology, combine, weights, codec, delay, bucket_bytes, heals: as for `GossipStrategy`.
        **ddp: arguments of Fabric's DDPStrategy (start_method, process_group_backend, ...), and `timeout`.

    Raises:
        ValueError: here for a wrong option; at `launch`, before any worker communicates, if the topology can't serve
            the number of workers, or the rule doesn't fit topology, weights and delay.
    """

    drifts: ClassVar[bool] = True

    def __init__(
        self,
        *,
        topology: Topology | None = None,
        combine: Rule | None = None,
        weights: Weights | None = None,
        codec: Codec | None = None,
        delay: int = 1,
        bucket_bytes: int | None = None,
        heals: int = 3,
        **ddp: Any,
    ) -> None:
        super().__init__(**ddp)
        check_numbers(delay, heals, bucket_bytes)
        self.topology = topology or Auto()
        self.combine = combine or Gossip()
        self.weights = weights or self.combine.weights
        self.codec = codec or Plain()
        refuse_lossy(self.codec, self.combine)
        self.states: Mapping[str, Travel] = {}
        self.island: Island = Solo()
        self.member = IslandMember(None, 1, self.meet)
        self.delay, self.bucket_bytes, self.heals = delay, bucket_bytes, heals
        self._mixers = Mixers(self._making)
        self.mean_model.hidden = self._mixers.note
        self.gradient_check = BeforeUpdate(self._adopt)

    @property
    def workers(self) -> int:
        return int(self.num_nodes * self.num_processes)

    @property
    def worker(self) -> int:
        return self.global_rank

    def place_on_hosts(self) -> None:
        place(self, max(1, self.num_processes), self.workers)

    def setup_environment(self) -> None:
        super().setup_environment()
        self.member = IslandMember(self.wire, 1, self.meet)

    def _making(self) -> MixerFactory:
        assert self.wire is not None
        rounds = MixerBuilder(self, self.wire, self.member, self.root_device, self.lightning_module, self.model_layout)
        return rounds.making(meet=self._meet_in_mean)

    def _meet_in_mean(self, parameters: Sequence[nn.Parameter]) -> None:
        Swap(parameters, self.health.mean(parameters))  # never undone

    # ---- a round after each update ----------------------------------------------------------------------------------

    def adopt(self, optimizer: Optimizer) -> None:
        refuse_shared(self.lightning_module)
        self._mixers.adopt(optimizer)
        self._mixers.mixed.watch(lambda: self.lightning_module.named_parameters(), self._group.layouts)

    def _adopt(self, optimizer: Optimizer) -> None:
        if self.wire is not None:
            with self._telling():
                self._mixers.adopt(optimizer)

    def advance(self, optimizer: Optimizer) -> None:
        self._mixers.step(optimizer)

    def settle(self) -> None:
        self._mixers.end()

    def share(self) -> float | None:
        assert self.wire is not None
        return self._mixers.share(self.wire.world, self.root_device, self.meet)

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def plan(self) -> dict[str, str]:
        fixed = {"combine": repr(self.combine), "codec": repr(self.codec), "delay": str(self.delay)}
        # A codec's estimate, or a relayed sum, belongs to one link; any other state continues on another topology.
        return {**fixed, **self.changeable()} if self.codec.remembers or self.combine.recovery.of_links else fixed

    def changeable(self) -> dict[str, str]:
        return {"topology": repr(self.topology), "weights": repr(self.weights)}

    def progress_state(self) -> dict[str, Any]:
        return self._mixers.state_dict()

    def load_progress_state(self, state: dict[str, Any]) -> None:
        self._mixers.load_state_dict(state, self.optimizers)

    def restart(self) -> None:
        self._mixers.release()
        for optimizer in self.optimizers:
            self.adopt(optimizer)

    # ---- what users watch -------------------------------------------------------------------------------------------

    def traffic(self) -> Traffic:
        """Count this worker's rounds, bytes sent, seconds waited and refused messages, without communication."""
        return self._mixers.traffic() + Traffic(left_out=self.health.left_out)

    def introduction(self) -> Sequence[str]:
        return introduced(self, self._mixers, "within `with strategy.mean():` the mean of the workers")

    @torch.no_grad()
    def consensus(self) -> Consensus:
        """Consensus error: the workers' distance from their mean. Collective: all-reduces the trained parameters."""
        if self.wire is None:
            return Consensus(0.0, 0.0)
        own = [bucket.flat for each in self._mixers for bucket in each.buckets]
        return spread(own, self.mean_of(own), self.mean_of, 1)
