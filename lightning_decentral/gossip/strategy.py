"""`Trainer(strategy="gossip")`: decentralized data-parallel training, one word away from `ddp`."""

from functools import partial
from typing import Any

import torch
from lightning.pytorch.strategies import StrategyRegistry
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from lightning_decentral.gossip.compute.codec.codec import Codec
from lightning_decentral.gossip.compute.codec.quantize import Plain
from lightning_decentral.gossip.compute.combine.combine import Combine
from lightning_decentral.gossip.compute.combine.consensus_control import ConsensusControl
from lightning_decentral.gossip.compute.combine.gossip import Gossip
from lightning_decentral.gossip.islands import IslandStrategy
from lightning_decentral.gossip.plan.topology.combined import Auto
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.traffic import all_reduce_copies, copies_sent, copies_through_card
from lightning_decentral.gossip.plan.weights import Weights, consensus_steps, describe
from lightning_decentral.gossip.wire.assembly import assembled
from lightning_decentral.gossip.wire.consensus import Consensus, mixer_of, squared_norm
from lightning_decentral.gossip.wire.exchange import Traffic
from lightning_decentral.gossip.wire.island import Island
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.gossip.wire.optimizer_mixer import Trained
from lightning_decentral.shared import registration as names
from lightning_decentral.shared.compute.buckets import Bucket
from lightning_decentral.shared.replica import Evaluate
from lightning_decentral.shared.wire.transport import Wire


class GossipStrategy(IslandStrategy):
    """x_i+ = sum_j w_ij x_j + u_i: each worker updates its own replica and averages with a few neighbours, not all.

    `optimizer_step` is the user's update, then one round: land what was launched `delay` updates ago, launch the next.
    With the default delay of 1 an exchange has a whole forward and backward to hide behind. One round per real step:
    nothing is sent while gradients are only accumulated. Any optimizer; its moments stay local.

    Args:
        topology: who hears whom at which step; `Auto()` reaches exact consensus in finite time for every size.
        combine: what a worker does with what it heard.
        weights: of what is heard; by default the rule's: the topology's own, or column-stochastic ones for push-sum.
        codec: how messages are encoded; `Plain()`, the default, sends parameters in their own type. Any other is for
            peers: where `Plain()` all-reduces in groups, each pair of a group exchanges encoded messages.
        island: what one worker is: a single device, or several (`AllReduce`, `FullyShard`).
        delay: updates between launch and landing. 0 blocks (adapt-then-combine), 1 overlaps (adapt-while-combining),
            k serves slow links and stragglers. Delayed mixing is stable only for small rates
            (`largest_stable_rate`); `Every(k, topology)` with delay k keeps one message in flight: always stable.
        evaluate: "mean" validates and tests the mean of the workers, "own" each worker's model.
        sigterm_every: rounds between two looks whether some worker got a SIGTERM.
        bucket_bytes: largest flat tensor that is sent as one message; by default an eighth of what an optimizer trains,
            from 2 MiB to 256 MiB: the links wait while one is mixed, and each costs a message's latency.
        **ddp: what Lightning's DDPStrategy itself takes (start_method, process_group_backend, timeout, ...).

    Raises:
        ValueError: here for an unknown option, a negative delay or a codec that must be wrapped; at set-up, before any
            worker talks, where the topology can't serve the number of workers or the rule can't work with topology,
            weights and delay (with the largest rate that is stable).

    Source: Wang et al. 2410.11998.
    """

    def __init__(
        self,
        *,
        topology: Topology | None = None,
        combine: Combine | ConsensusControl | None = None,
        weights: Weights | None = None,
        codec: Codec | None = None,
        island: Island | None = None,
        delay: int = 1,
        evaluate: Evaluate = "mean",
        sigterm_every: int = 10,
        bucket_bytes: int | None = None,
        **ddp: Any,
    ) -> None:
        super().__init__(island=island, evaluate=evaluate, sigterm_every=sigterm_every, **ddp)
        if delay < 0:
            raise ValueError(f"delay must be at least 0, got {delay}: 0 blocks, 1 overlaps, k lands k updates later")
        if codec is not None and not codec.complete:
            raise ValueError(
                f"{codec} by itself would never send the rest of the parameters: use DifferenceCompression({codec}) "
                "and a smaller rate"
            )
        self.topology = topology or Auto()
        self.combine = combine or Gossip()
        self.weights = weights or self.combine.weights
        self.codec = codec or Plain()
        self.delay = delay
        self.bucket_bytes = bucket_bytes
        self._trained: list[Trained] = []
        self._taken: set[nn.Parameter] = set()

    # ---- set-up -------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Check the plan, then connect."""
        self._place()
        self.combine.check(self.topology, self.workers, self.weights, self.delay)
        super().setup_environment()

    def _place(self) -> None:
        """Tell the topology the nodes, where it wasn't told."""
        self.topology = self.topology.placed(self.workers_per_node)

    def prepare(self, wire: Wire | None) -> None:
        """One mixer and one group for each optimizer."""
        self._trained, self._taken = [], set()
        for optimizer in self.optimizers if wire is not None else []:
            self._trained_by(optimizer).adopt()

    def _trained_by(self, optimizer: Optimizer) -> Trained:
        """Of this optimizer; a new one where the optimizers were replaced, on all workers in the same step."""
        trained = next((t for t in self._trained if t.optimizer is optimizer), None)
        if trained is None:
            trained = Trained(optimizer, self._mixer(), self._taken, self._member, self.bucket_bytes)
            self._trained.append(trained)
        return trained

    def _mixer(self) -> Mixer:
        assert self._wire is not None
        plan = self.topology, self.weights, self.workers
        exchange = assembled(*plan, self.worker, self._member, self.root_device, self.codec, self.delay)
        return mixer_of(self.combine, exchange, self.delay, partial(self._wire.group, None))

    # ---- rounds -------------------------------------------------------------------------------------------------

    def advance(self, optimizer: Optimizer) -> None:
        """One round of the mixer of this optimizer."""
        trained = self._trained_by(optimizer)
        trained.adopt()
        trained.step(_learning_rate(optimizer))

    def take_part(self, index: int) -> None:
        """One round without an update."""
        trained = self._trained[index]
        trained.step(_learning_rate(trained.optimizer))

    def rounds(self) -> list[int]:
        """Steps taken, one number for each optimizer."""
        return [trained.mixer.steps for trained in self._trained]

    def wanted(self) -> list[int]:
        """Steps that the neighbours must have taken."""
        return [max(t.mixer.steps, t.mixer.wanted) for t in self._trained]

    def settle(self) -> None:
        """Land what is in flight."""
        for trained in self._trained:
            trained.drain()

    def share(self) -> float | None:
        """w_i / sum_j w_j of push-sum (the first optimizer's where there are several). Collective."""
        shares = [share for trained in self._trained[:1] for share in trained.mixer.shares()[:1]]
        if not shares or self._wire is None:
            return None
        own, world = shares[0].double().to(self.root_device), self._wire.world
        total = own.clone()
        self._meet(lambda: world.all_reduce(total).wait())
        return float(own / total)

    def release(self) -> None:
        """Give every parameter a storage of its own again."""
        self._drop()
        super().release()

    def _drop(self) -> None:
        for trained in self._trained:
            trained.release()
        self._trained, self._taken = [], set()

    def progress_state(self) -> dict[str, Any]:
        """The mixers' states."""
        return {
            "mixers": [trained.mixer.state_dict() for trained in self._trained],
            "packs": [list(trained.packs) for trained in self._trained],
        }

    def load_progress_state(self, state: dict[str, Any]) -> None:
        """Restore the mixers, their buckets packed as they were: a message in flight has their layout."""
        if len(self.optimizers) != len(state["mixers"]):
            raise ValueError(
                f"the checkpoint has {len(state['mixers'])} optimizers, this run has {len(self.optimizers)}: "
                "resume with the same configure_optimizers"
            )
        self._drop()
        for optimizer, packs, mixer_state in zip(self.optimizers, state["packs"], state["mixers"], strict=True):
            trained = self._trained_by(optimizer)
            for number in packs:
                trained.adopt(number)
            trained.mixer.load_state_dict(mixer_state)

    # ---- what users watch ---------------------------------------------------------------------------------------

    @property
    def _buckets(self) -> list[Bucket]:
        return [bucket for trained in self._trained for bucket in trained.buckets]

    def traffic(self) -> Traffic:
        """This worker's rounds, bytes sent, seconds waited and in flight, and refused messages since fit began.

        No communication.
        """
        return sum((trained.mixer.exchange.traffic() for trained in self._trained), Traffic())

    def mixing(self) -> dict[str, float]:
        """How this worker mixes now (by its first optimizer): only what rule and codec have. No communication."""
        ruled = self._trained[0].mixer.mixing() if self._trained else {}
        errors = [error for t in self._trained for error in t.mixer.codec_errors()]
        return {**ruled, "delay": float(self.delay), **({"codec_error": max(errors)} if errors else {})}

    @torch.no_grad()
    def consensus(self) -> Consensus:
        """How far the workers are apart now. Collective: every worker calls it at the same step; costs one all-reduce
        of the trained parameters, and makes the workers wait for each other."""
        if self._wire is None:
            return Consensus(0.0, 0.0)
        own = [bucket.flat for bucket in self._buckets]
        means = self.mean_of_buckets(own)
        squares = [squared_norm([a - b for a, b in zip(own, means, strict=True)]), squared_norm(means)]
        apart, norm = (self._member.shards * square for square in self.mean_of(squares))
        return Consensus(float(apart.sqrt()), float((apart / norm.clamp(min=1e-300)).sqrt()))

    def summary(self) -> dict[str, str]:
        """The plan in words, for the start of a run."""
        size, steps = self.workers, consensus_steps(self.topology, self.workers, self.weights)
        model_bytes = sum(bucket.bytes for bucket in self._buckets)
        device_bytes = sum(t.mixer.exchange.coder.bytes for t in self._trained)  # each sends a part of an island's
        message_bytes = device_bytes * self.island.devices // self.island.shards
        copies = copies_sent(self.topology, self.weights, self.worker, size, peers_only=self.codec.encodes)
        sent_bytes = copies * device_bytes * self.combine.copies
        adams = {type(o).__name__ for o in self.optimizers if isinstance(o, (Adam, AdamW)) and size > 1}
        order = {0: "blocking (adapt-then-combine)", 1: "overlapped (adapt-while-combining)"}
        summary = {
            "workers": str(size) if self.island.devices == 1 else f"{size} islands, each {self.island!r}",
            "topology": describe(self.topology, size, self.weights),
            "steps to exact consensus": "never exact" if steps is None else str(steps),
            "order": order.get(self.delay, f"landed {self.delay} updates later"),
            "codec": repr(self.codec),
            "bytes per worker and step": f"{sent_bytes:,.0f} ({sent_bytes / max(model_bytes, 1):.3g} x the parameters)",
            "bytes through a node's card": self._through_card(message_bytes * self.combine.copies, model_bytes),
            "evaluated": "the mean of the workers" if self.evaluate == "mean" else "each worker's own model",
        }
        hint = "takes smaller steps here than under ddp: see lightning_decentral.optim.AccumAdam"
        return summary | ({"hint": f"{' and '.join(sorted(adams))} {hint}"} if adams else {})

    def _through_card(self, message_bytes: int, model_bytes: int) -> str:
        """What the plan sends out of the busiest node, and what a ring all-reduce of the gradients would."""
        if self.num_nodes == 1:
            return "none, there is one node"
        plan = self.topology, self.weights, self.workers, self.workers_per_node
        steps = copies_through_card(*plan, peers_only=self.codec.encodes)
        mean, most = sum(steps) / len(steps) * message_bytes, max(steps) * message_bytes
        reduced = all_reduce_copies(self.num_nodes * self.num_processes, self.num_processes) * model_bytes
        return f"{mean:,.0f} a step, at most {most:,.0f} (all-reduce: {reduced:,.0f})"

    # ---- names --------------------------------------------------------------------------------------------------

    @classmethod
    def register_strategies(cls, strategy_registry: Any = StrategyRegistry) -> None:
        """`gossip` and its variants for other ways to start processes."""
        names.register(strategy_registry, "gossip", cls, "decentralized gossip averaging")


def _learning_rate(optimizer: Optimizer) -> float:
    """Of the first group: schedules change all groups alike."""
    return float(optimizer.param_groups[0].get("lr", 1.0))
