"""`Trainer(strategy="gossip")`: decentralized data-parallel training, one word away from `ddp`."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.strategies import StrategyRegistry
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from lightning_decentral.gossip.compute.codec.codec import Coding
from lightning_decentral.gossip.compute.codec.quantize import Plain
from lightning_decentral.gossip.compute.combine.combine import Combine
from lightning_decentral.gossip.compute.combine.gossip import Gossip
from lightning_decentral.gossip.islands import IslandStrategy
from lightning_decentral.gossip.plan.topology.combined import Auto
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.traffic import Partition, all_reduce_copies, copies_through_card, partitions
from lightning_decentral.gossip.plan.weights import Weights, consensus_steps, describe
from lightning_decentral.gossip.wire.clique import CliqueExchange, ExchangeByStep
from lightning_decentral.gossip.wire.consensus import Consensus, Gauge, squared_norm
from lightning_decentral.gossip.wire.exchange import Exchange, Traffic
from lightning_decentral.gossip.wire.island import Island
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.gossip.wire.optimizer_mixer import Trained
from lightning_decentral.gossip.wire.overlap import beside
from lightning_decentral.gossip.wire.peer import PeerExchange
from lightning_decentral.shared import registration as names
from lightning_decentral.shared.compute.buckets import Bucket
from lightning_decentral.shared.replica import Evaluate
from lightning_decentral.shared.wire.transport import Transport, Wire


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
        combine: Combine | None = None,
        weights: Weights | None = None,
        codec: Coding | None = None,
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
        self.codec.check(self.topology, self.workers, self.weights, self.delay)
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
            mixer = Mixer([], self.combine, self._exchange(), self.delay, self._gauge())
            trained = Trained(optimizer, mixer, self._taken, self._member, self.bucket_bytes)
            self._trained.append(trained)
        return trained

    def _exchange(self) -> Exchange:
        cliques = partitions(self.topology, self.weights, self.workers) if self.codec == Plain() else None
        if cliques is None:
            return self._member.exchange(self._beside(self._peers()), encoded=self.codec != Plain())
        if all(cliques):
            by_clique = self._cliques([step for step in cliques if step])
            return self._member.exchange(self._beside(by_clique), encoded=False)
        alone = tuple((rank,) for rank in range(self.workers))
        by_clique, by_peers = self._cliques([step or alone for step in cliques]), self._peers()
        by_step = ExchangeByStep([by_clique if step else by_peers for step in cliques])
        return self._member.exchange(self._beside(by_step), encoded=False)

    def _beside(self, exchange: Exchange) -> Exchange:
        return beside(exchange, self.root_device, self.delay)

    def _gauge(self) -> Gauge:
        assert self._wire is not None
        over = self._wire.group(None) if self.combine.lag else None
        return Gauge(self.combine.lag, over.all_reduce if over else None)

    def _peers(self) -> Exchange:
        peers = self._member.peers(range(self.workers))
        assert peers is not None
        return PeerExchange(self.topology, self.weights, peers, self.root_device, self.codec)

    def _cliques(self, cliques: Sequence[Partition]) -> Exchange:
        groups = {c: self._member.peers(c) for c in dict.fromkeys(c for step in cliques for c in step) if len(c) > 1}
        mine: dict[tuple[int, ...], Transport] = {c: t for c, t in groups.items() if t is not None}
        return CliqueExchange(cliques, mine, self.worker, self.root_device)

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
        errors = [e for t in self._trained if (e := t.mixer.exchange.codec_error()) is not None]
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
        message_bytes = sum(t.mixer.exchange.message_bytes([b.flat for b in t.mixer.buckets]) for t in self._trained)
        period = self.topology.period(size)
        exchanges = [trained.mixer.exchange for trained in self._trained[:1]]
        copies = sum(exchange.copies_sent(step) for exchange in exchanges for step in range(period)) / period
        sent_bytes = copies * message_bytes * self.combine.copies
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
        steps = copies_through_card(*plan, peers_only=self.codec != Plain())
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
