"""`Trainer(strategy="gossip")`: decentralized data-parallel training. `wire/assembly` draws a whole round."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_decentral.gossip.compute.combine.combine import Rule, refuse_lossy
from lightning_decentral.gossip.compute.combine.gossip import Gossip
from lightning_decentral.gossip.compute.travel import Travel
from lightning_decentral.gossip.island import Island, Solo
from lightning_decentral.gossip.mixer_builder import MixerBuilder, check_numbers, exact_steps_of, place
from lightning_decentral.gossip.plan.topology.combined import Auto
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import Weights
from lightning_decentral.gossip.sharded import IslandModel, WholeMatrices, joined
from lightning_decentral.gossip.summary import described, hyperparameters, introduced
from lightning_decentral.gossip.wire.consensus import Consensus, spread
from lightning_decentral.gossip.wire.exchange import Traffic
from lightning_decentral.gossip.wire.island_member import IslandMember
from lightning_decentral.gossip.wire.making import MixerFactory
from lightning_decentral.gossip.wire.optimizers import Mixers
from lightning_decentral.shared.checkpoint.reading import PRECISION
from lightning_decentral.shared.compute.buckets import Bucket
from lightning_decentral.shared.compute.codec.codec import Codec, Plain
from lightning_decentral.shared.compute.layout import refuse_shared
from lightning_decentral.shared.meeting import TIMEOUT
from lightning_decentral.shared.plan.arguments import Elasticity, StrategyType, checked
from lightning_decentral.shared.replica_strategy import Evaluate, ReplicaStrategy
from lightning_decentral.shared.updates import BeforeUpdate, Mixed
from lightning_decentral.shared.wire.mean import Swap
from lightning_decentral.shared.wire.meeting.comparison import TrainedLayout
from lightning_decentral.shared.wire.transport import Wire


@checked
class GossipStrategy(ReplicaStrategy, metaclass=StrategyType):
    """x_i+ = sum_j w_ij x_j + u_i: each worker updates its own replica and averages with a few neighbours, not all.

    Each optimizer step runs the user's update, then one gossip round: mix the messages launched `delay` updates ago,
    and launch the next. With the default delay of 1 an exchange overlaps a whole forward and backward. Nothing is sent
    while gradients are only accumulated. Works with any optimizer, whose moments stay local.

    Args:
        topology: communication graph by step; `Auto()` reaches exact consensus in finitely many steps for every size.
        combine: update rule: what a worker does with what it received.
        weights: mixing weights; by default the rule's: the topology's own, or column-stochastic ones for push-sum.
        codec: how messages are encoded; `Plain()`, the default, sends parameters in their own type. Where `Plain()`
            all-reduces in a group, any other codec has each pair of the group exchange encoded messages. Under
            `PseudoGradient` each worker instead adds up the codes of the part that it owns.
        states: optimizer states to mix with the parameters, by name: `{"momentum_buffer": Travel()}`.
        island: what one worker is: a single device, or several (`AllReduce`, `FullyShard`).
        delay: updates between sending and mixing. 0 blocks (adapt-then-combine), 1 overlaps (adapt-while-combining),
            k serves slow links and stragglers. Delayed mixing is stable only for small mixing rates
            (`largest_stable_rate`); `Every(k, topology)` with delay k keeps one message in flight: always stable.
        evaluate: "mean" validates and tests the mean of the workers (or a rule's anchors), "own" each worker's model.
        timeout: how long a worker waits for another worker, in any call, before it ends with an error.
        bucket_bytes: largest flat tensor that is sent as one message. The default on the CPU is an eighth of one
            optimizer's parameters, from 2 MiB to 256 MiB: large messages leave links idle while they are mixed, and
            each message costs a latency. The default on a GPU is 1 GiB, since all messages are mixed together there.
        heals: how often a worker whose parameters contain NaN, infinity or far too large numbers copies its neighbours'
            parameters and goes on; 0 ends the training, as do your own rules without `heal` and `AllReduce` by NCCL.
        exact_steps: number of first updates (below 1: their share of the run) after each of which all workers wait and
            average exactly, before the rule begins.
        elastic: an `Elastic` lets workers come and go; the constructor then returns an `ElasticGossipStrategy`.
        **ddp: arguments of Lightning's DDPStrategy (start_method, process_group_backend, ...).

    Raises:
        ValueError: here for a wrong option; at set-up, before any worker communicates, if the topology can't serve the
            number of workers, or the rule doesn't fit topology, weights and delay (names the largest stable rate).

    Source: Wang et al. 2410.11998.
    """

    drifts: ClassVar[bool] = True
    island: Island
    member: IslandMember  # this device as a member of its island; a single device until `arrange`

    def __init__(
        self,
        *,
        topology: Topology | None = None,
        combine: Rule | None = None,
        weights: Weights | None = None,
        codec: Codec | None = None,
        states: Mapping[str, Travel] | None = None,
        island: Island | None = None,
        delay: int = 1,
        evaluate: Evaluate = "mean",
        timeout: timedelta = TIMEOUT,
        bucket_bytes: int | None = None,
        heals: int = 3,
        exact_steps: float = 0.0,
        elastic: Elasticity | None = None,
        **ddp: Any,
    ) -> None:
        super().__init__(timeout=timeout, **ddp)
        if elastic is not None:  # the metaclass has chosen the elastic class by now, unless a subclass was constructed
            raise ValueError(
                f"elastic chooses another class than {type(self).__name__}: give Elastic(...) to GossipStrategy, "
                "or subclass ElasticGossipStrategy"
            )
        check_numbers(delay, heals, bucket_bytes, exact_steps)
        self.topology = topology or Auto()
        self.combine = combine or Gossip()
        self.weights, self.codec = weights or self.combine.weights, codec or Plain()
        refuse_lossy(self.codec, self.combine)
        self.states: Mapping[str, Travel] = states or {}
        self.island = island or Solo()
        self.starts_on_host = self.island.shards > 1  # the whole model may not fit on one device
        self.delay, self.evaluate, self.elastic = delay, evaluate, elastic
        self.bucket_bytes, self.heals, self.exact_steps = bucket_bytes, heals, float(exact_steps)
        self.member = IslandMember(None, 1, self.meet)
        self._mixers = Mixers(self._making)
        self.mean_model.hidden = self._hidden
        self._matrices = WholeMatrices([], self.member)
        self.checkpoints.held = IslandModel(self.island, self, self._group.join_groups)
        self.followed, self.gradient_check = self, BeforeUpdate(self._adopt)

    @property
    def workers(self) -> int:
        return self.island.workers(self.num_nodes * self.num_processes, self.num_processes)

    @property
    def workers_per_node(self) -> int:
        """Islands that share a node's network card; 1 where an island has several nodes."""
        return int(max(1, self.num_processes // self.island.devices))

    @property
    def devices_per_worker(self) -> int:  # type: ignore[override]
        return self.island.devices

    @property
    def worker(self) -> int:
        return self.global_rank // self.island.devices

    @property
    def keeps_wholes(self) -> bool:
        return self.is_global_zero

    # ---- set-up -----------------------------------------------------------------------------------------------------

    def place_on_hosts(self) -> None:
        place(self, self.workers_per_node, self.workers)  # the topology may depend on the number of nodes

    def arrange(self) -> None:
        if self.wire is not None:
            self.member = joined(self.island, self, self.wire)

    def prepare(self, wire: Wire | None) -> None:
        self.island.refuse(self.optimizers)
        if wire is not None and self.island.shards == 1:
            refuse_shared(self._module)
        self._mixers, self.health.left_out = Mixers(self._making), 0
        self._matrices = WholeMatrices(self.optimizers, self.member)
        for optimizer in self.optimizers if wire is not None else []:
            self._mixers.adopt(optimizer)
        self.member.compare(TrainedLayout(self._module.named_parameters, lambda: self.optimizers), self._group.layouts)
        self._mixers.mixed.watch(self._module.named_parameters, self._group.layouts)

    def mixed(self) -> list[Mixed]:
        return [(each.mixer.steps, [p for bucket in each.buckets for p in bucket.parameters]) for each in self._mixers]

    def replaced(self) -> None:
        self.island.refuse(self.optimizers)
        self.member.replaced()
        self._matrices.close()
        self._matrices = WholeMatrices(self.optimizers, self.member)
        self._mixers.follow(self.optimizers)

    def _making(self) -> MixerFactory:
        assert self.wire is not None
        exact = self._mixers.exact_steps
        if exact is None:
            exact = exact_steps_of(self.exact_steps, self._module, self.broadcast)
        rounds = MixerBuilder(self, self.wire, self.member, self.root_device, self._module, self.model_layout)
        return rounds.making(exact, self._meet_in_mean)

    def _meet_in_mean(self, parameters: Sequence[nn.Parameter]) -> None:
        Swap(parameters, self.health.mean(self.shown(parameters)))  # never undone

    # ---- a step: the island's gradients and the user's update (`ReplicaStrategy`), one round ------------------------

    def _adopt(self, optimizer: Optimizer) -> None:
        if self.wire is not None:
            self._mixers.adopt(optimizer)

    def advance(self, optimizer: Optimizer) -> None:
        self._mixers.step(optimizer)

    def take_part(self, index: int) -> None:
        self._mixers[index].step()

    def rounds(self) -> list[int]:
        return [each.mixer.steps for each in self._mixers]

    def wanted(self) -> list[int]:
        return [max(each.mixer.steps, each.mixer.wanted) for each in self._mixers]

    def settle(self) -> None:
        self._mixers.end()

    def _hidden(self, written: Sequence[Tensor]) -> None:
        self._mixers.note(written)

    def share(self) -> float | None:
        return None if self.wire is None else self._mixers.share(self.wire.world, self.root_device, self.meet)

    def release(self) -> None:
        self._mixers.release()
        self._matrices.close()
        self.member.close(self.cut_off)
        self.member = IslandMember(None, 1, self.meet)

    # ---- the mean model and checkpoints -----------------------------------------------------------------------------

    def mean_of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return self.member.mean(tensors, super().mean_of)

    def shown(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Replace parameters by the rule's anchors, where the rule has any and the parameters aren't sharded."""
        anchors = self._mixers.shown(self.mean_model.shows) if self.member.shards == 1 else {}
        return [anchors.get(tensor.data_ptr(), tensor) for tensor in tensors] if anchors else tensors

    def progress_state(self) -> dict[str, Any]:
        return {**self._mixers.state_dict(), "gradients": self.member.progress_state()}

    def load_progress_state(self, state: dict[str, Any]) -> None:
        self._mixers.load_state_dict(state, self.optimizers)
        if gradients := state.get("gradients"):
            self.member.load_progress_state(gradients)

    def plan(self) -> dict[str, str]:
        fixed = {"combine": repr(self.combine), "codec": repr(self.codec), "delay": str(self.delay)}
        # From Lightning's precision: it converts a module after loading. Under mixed precision parameters are float32.
        precision, true, _ = str(self.precision_plugin.precision).partition("-true")
        fixed |= {PRECISION: precision if true else "32"}
        fixed |= {"states": repr(self.states)} if self.states else {}
        fixed |= {"exact steps": f"{self.exact_steps:g}"} if self.exact_steps else {}
        fixed |= {"fragments": str(n)} if (n := len(self.topology.fragments)) > 1 else {}
        # A codec's estimate, or a relayed sum, belongs to one link; any other state continues on another topology.
        return {**fixed, **self.changeable()} if self.codec.remembers or self.combine.recovery.of_links else fixed

    def changeable(self) -> dict[str, str]:
        return {"topology": repr(self.topology), "weights": repr(self.weights)}

    def restart(self) -> None:
        self._mixers.release()
        self.prepare(self.wire)

    @property
    def buckets(self) -> list[Bucket]:
        """Flat tensors that are mixed, over all optimizers."""
        return [bucket for each in self._mixers for bucket in each.buckets]

    def traffic(self) -> Traffic:
        """Counts of this device's rounds, bytes sent, seconds waited and in flight since fit began; no messages."""
        return self._mixers.traffic() + Traffic(left_out=self.health.left_out)

    def mixing(self) -> dict[str, float]:
        """Mixing values (rate, delay, codec error) of this worker's first optimizer; no communication."""
        ruled = next((each.mixer.mixing() for each in self._mixers), {})
        errors = [error for each in self._mixers for error in each.mixer.codec_errors()]
        return {**ruled, "delay": float(self.delay), **({"codec_error": max(errors)} if errors else {})}

    @torch.no_grad()
    def consensus(self) -> Consensus:
        """Consensus error: the workers' distance from their mean. Collective: all-reduces the trained parameters."""
        if self.wire is None:
            return Consensus(0.0, 0.0)
        own = [bucket.flat for bucket in self.buckets]
        means = self.member.mean_of_buckets(own, super().mean_of)
        return spread(own, means, self.mean_of, self.member.shards)

    def introduction(self) -> Sequence[str]:
        return introduced(self, self._mixers)

    def summary(self) -> dict[str, str]:
        return described(self, self._mixers)

    def hyperparameters(self) -> dict[str, float | str]:
        return hyperparameters(self, self._mixers)
