"""`Fabric(strategy="gossip")`: gossip in a loop of the user's own, on the parts of `GossipStrategy`."""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_decentral.gossip.compute.combine.combine import Combine
from lightning_decentral.gossip.compute.combine.consensus_control import ConsensusControl
from lightning_decentral.gossip.compute.combine.gossip import Gossip
from lightning_decentral.gossip.plan.topology.combined import Auto
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import Weights
from lightning_decentral.gossip.wire.assembly import assembled, refuse_impossible
from lightning_decentral.gossip.wire.consensus import Consensus, mixer_of, spread
from lightning_decentral.gossip.wire.exchange import Traffic
from lightning_decentral.gossip.wire.island_member import IslandMember
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.gossip.wire.optimizer_mixer import Mixers, healing
from lightning_decentral.shared.compute.buckets import Bucket
from lightning_decentral.shared.compute.codec.codec import Codec
from lightning_decentral.shared.compute.codec.quantize import Plain
from lightning_decentral.shared.fabric.strategy import FabricWorkers
from lightning_decentral.shared.plan.arguments import checked


@checked
class FabricGossipStrategy(FabricWorkers):
    """x_i+ = sum_j w_ij x_j + u_i, as `GossipStrategy`, where the user's own loop calls `optimizer.step()`.

    One round per step of an optimizer. Nothing is sent in a backward: under `fabric.no_backward_sync` and without it
    gradients are this worker's. Every worker takes the same number of steps.

    Args:
        topology, combine, weights, codec, delay, bucket_bytes, heals: as for `GossipStrategy`.
        **ddp: what Fabric's DDPStrategy itself takes (start_method, process_group_backend, ...), and `timeout`.

    Raises:
        ValueError: here for an option that is wrong; at `launch`, before any worker talks, where the topology can't
            serve the number of workers or the rule can't work with it, weights and delay.
    """

    drifts: ClassVar[bool] = True

    def __init__(
        self,
        *,
        topology: Topology | None = None,
        combine: Combine | ConsensusControl | None = None,
        weights: Weights | None = None,
        codec: Codec | None = None,
        delay: int = 1,
        bucket_bytes: int | None = None,
        heals: int = 3,
        **ddp: Any,
    ) -> None:
        super().__init__(**ddp)
        refuse_impossible(codec, delay, bucket_bytes, heals)
        self.topology = topology or Auto()
        self.combine = combine or Gossip()
        self.weights = weights or self.combine.weights
        self.codec = codec or Plain()
        self.delay, self.bucket_bytes, self.heals = delay, bucket_bytes, heals
        self._mixers = Mixers(self._mixer, self._packed)

    def setup_environment(self) -> None:
        self.topology = self.topology.placed(max(1, self.num_processes))
        self.combine.check(self.topology, self.num_nodes * self.num_processes, self.weights, self.delay)
        super().setup_environment()

    def _member(self) -> IslandMember:
        return IslandMember(self.wire, 1, self._meet)

    def _packed(self, parameters: Sequence[nn.Parameter]) -> list[Bucket]:
        return self._member().pack(parameters, self.bucket_bytes)

    def _mixer(self) -> Mixer:
        assert self.wire is not None
        plan = self.topology, self.weights, self.world_size
        exchange = assembled(*plan, self.global_rank, self._member(), self.root_device, self.codec, self.delay)
        mixer = mixer_of(self.combine, exchange, self.delay, partial(self.wire.group, None))
        incurable = partial(self.combine.incurable, self.topology, self.world_size, self.weights)
        mixer.healing = healing(self.heals, self.lightning_module, incurable)
        return mixer

    # ---- a round after each update ----------------------------------------------------------------------------------

    def adopt(self, optimizer: Optimizer) -> None:
        self._mixers.of(optimizer).adopt()

    def advance(self, optimizer: Optimizer) -> None:
        self._mixers.step(optimizer)

    def settle(self) -> None:
        self._mixers.settle()

    def share(self) -> float | None:
        assert self.wire is not None
        return self._mixers.share(self.wire.world, self.root_device, self._meet)

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    @property
    def keeps(self) -> bool:
        return True

    def plan(self) -> dict[str, str]:
        fixed = {"combine": repr(self.combine), "codec": repr(self.codec), "delay": str(self.delay)}
        # An estimate, or a relayed sum, is about one link; anything else goes on over other ones.
        return {**fixed, **self.changeable()} if self.codec.remembers or self.combine.of_links else fixed

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
        """This worker's rounds, bytes sent, seconds waited and in flight, and refused messages. No communication."""
        healed = sum(of.mixer.healing.healed for of in self._mixers)
        return sum(
            (of.mixer.exchange.traffic() for of in self._mixers), Traffic(left_out=self.health.left_out, healed=healed)
        )

    @torch.no_grad()
    def consensus(self) -> Consensus:
        """How far the workers are apart now. Collective, at the price of one all-reduce of the trained parameters."""
        if self.wire is None:
            return Consensus(0.0, 0.0)
        own = [bucket.flat for of in self._mixers for bucket in of.buckets]
        return spread(own, self.mean_of(own), self.mean_of, 1)
