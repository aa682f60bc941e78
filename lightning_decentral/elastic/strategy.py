"""Gossip strategy whose workers may join, leave or die during the training: an elastic `run` with gossip's rounds."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_decentral.elastic.checkpoints import ElasticCheckpoints
from lightning_decentral.elastic.checks import refuse_extras
from lightning_decentral.elastic.option import Elastic
from lightning_decentral.elastic.run import ElasticRun
from lightning_decentral.elastic.wire.participant import Participant
from lightning_decentral.elastic.wire.rounds.holding import CopiedHolding, Holding, ShardedHolding
from lightning_decentral.gossip.compute.combine.combine import Rule
from lightning_decentral.gossip.compute.combine.gossip import Gossip
from lightning_decentral.gossip.compute.travel import Travel
from lightning_decentral.gossip.island import Island, Solo
from lightning_decentral.gossip.plan.topology.combined import Auto
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import Weights
from lightning_decentral.gossip.sharded import IslandModel, WholeMatrices, joined
from lightning_decentral.gossip.wire.island_member import IslandMember
from lightning_decentral.shared.compute.codec.codec import Codec, Plain
from lightning_decentral.shared.compute.layout import refuse_shared
from lightning_decentral.shared.meeting import TIMEOUT
from lightning_decentral.shared.plan.arguments import checked
from lightning_decentral.shared.replica_strategy import Evaluate, ReplicaStrategy
from lightning_decentral.shared.wire.transport import Wire


@checked
class ElasticGossipStrategy(ElasticRun, ReplicaStrategy):
    """Trains by x_i+ = sum_j w_ij x_j + u_i over the current members, as `GossipStrategy(elastic=...)`.

    When a worker dies, the others miss the messages that it hasn't sent. A worker that is started copies the state of
    a member that trains, and takes part from the next membership on. Needs CPU or CUDA devices; messages are sent from
    the host. Under manual optimization a round of each optimizer follows a batch.

    Args:
        elastic: the lobby at which workers meet, and its limits.
        topology, weights, delay, evaluate, timeout, bucket_bytes, heals: as `GossipStrategy`'s.
        combine: `Gossip`, `QuasiGlobalMomentum`, `Outer`, `OuterNesterov` or `PseudoGradient`; other rules keep sums
            over all workers. Outer rounds in which all average all are committed (`elastic.plan.commit`).
        codec: one without state between rounds: `Int8()`, a smaller type; with `PseudoGradient` coarser ones, too.
        island: devices that are one worker (`AllReduce`, `FullyShard`): it dies, restarts and joins as a whole.
        states: as `GossipStrategy`'s, on workers of one device.
        exact_steps: number of first steps after each of which all members are averaged exactly.
        **ddp: options of Lightning's DDPStrategy.

    Raises:
        ValueError: for an option that elastic runs don't support, or a topology that needs a fixed number of workers.
    """

    own: ClassVar[Sequence[str]] = ("elastic",)
    island: Island
    member: IslandMember

    def __init__(
        self,
        *,
        elastic: Elastic,
        topology: Topology | None = None,
        combine: Rule | None = None,
        weights: Weights | None = None,
        codec: Codec | None = None,
        island: Island | None = None,
        delay: int = 1,
        evaluate: Evaluate = "mean",
        timeout: timedelta = TIMEOUT,
        bucket_bytes: int | None = None,
        heals: int = 3,
        states: Mapping[str, Travel] | None = None,
        exact_steps: float = 0.0,
        **ddp: Any,
    ) -> None:
        super().__init__(timeout=timeout, **ddp)
        self.states, self.exact_steps = states or {}, float(exact_steps)
        self.island, self.evaluate = island or Solo(), evaluate
        self.starts_on_host = self.island.shards > 1
        self.member = IslandMember(None, 1, self.meet)
        self._matrices = WholeMatrices([], self.member)
        rule = combine or Gossip()
        self.elastic, self.topology, self.codec = elastic, topology or Auto(), codec or Plain()
        self.weights, self.delay, self.bucket_bytes, self.heals = weights or rule.weights, delay, bucket_bytes, heals
        self.plan_rounds(rule)
        refuse_extras(self)
        held = IslandModel(self.island, self, self._group.join_groups)
        self.checkpoints = ElasticCheckpoints(self, self.mean_model, held)  # type: ignore[assignment]

    @property
    def batches(self) -> int:  # type: ignore[override]
        return self.island.devices

    devices = batches

    def refuse(self, module: nn.Module, fitting: bool) -> None:
        super().refuse(module, fitting)
        devices, island = self.num_nodes * self.num_processes, self.island
        if devices != island.devices:
            raise ValueError(
                f"an elastic worker is {island!r}, but this Trainer has {devices} devices: start a process with "
                f"Trainer(devices={island.devices}) for each worker, or give island=AllReduce({devices})"
            )
        if self.root_device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"elastic runs train on CPUs and CUDA devices, not on {self.root_device}: give accelerator='cpu'"
            )
        if self.states and self.root_device.type != "cpu":
            raise ValueError(f"states={self.states!r} travel from hosts, not from {self.root_device}: leave it out")

    @property
    def keeps_wholes(self) -> bool:
        return self.is_global_zero if self._member is None else self._member.leads

    def arrange(self) -> None:
        if self.wire is not None:
            self.member = joined(self.island, self, self.wire)

    def prepare(self, wire: Wire | None) -> None:
        super().prepare(wire)
        if self.island.shards == 1:
            refuse_shared(self._module)
        self._matrices = WholeMatrices(self.optimizers, self.member)

    def holding(self, member: Participant) -> Holding:
        if self.wire is None:
            return Holding(self.root_device)
        return (ShardedHolding if self.island.shards > 1 else CopiedHolding)(self.root_device, member, self.wire)

    def whole(self, own: dict[str, Any]) -> dict[str, Any]:
        return self.checkpoints.held.whole(own)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self.member.shards > 1:
            self.checkpoints.held.take(self._module, checkpoint["state_dict"])
        else:
            super().load_model_state_dict(checkpoint, strict)

    def gradients(self, closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
        return partial(self.member.averaging, closure)

    def release(self) -> None:
        self._mixers.release()
        self._matrices.close()
        self.member.close(self.cut_off)
        self.member, self._held = IslandMember(None, 1, self.meet), Holding(self.root_device)

    def shown(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the rule's anchors in place of the parameters that have one, for the mean model."""
        anchors = self._mixers.shown(self.mean_model.shows) if self.member.shards == 1 else {}
        return [anchors.get(tensor.data_ptr(), tensor) for tensor in tensors]
