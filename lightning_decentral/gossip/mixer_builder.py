"""Set-up of gossip rounds: checks of the settings, and mixers for each optimizer, model fragment and mixed state."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_decentral.gossip.compute.combine.combine import Rule, refuse_overshoot
from lightning_decentral.gossip.compute.error_feedback import RULE_OF_THUMB, share_that_arrives
from lightning_decentral.gossip.compute.link import cliques_of
from lightning_decentral.gossip.compute.travel import pack_states
from lightning_decentral.gossip.island import GossipPlan
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.wire.assembly import assembled
from lightning_decentral.gossip.wire.consensus import mixer_of
from lightning_decentral.gossip.wire.island_member import IslandMember
from lightning_decentral.gossip.wire.making import MixerFactory, StateMixer
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.gossip.wire.optimizer_mixer import healing
from lightning_decentral.shared.compute.buckets import Bucket, check_bucket_bytes
from lightning_decentral.shared.compute.codec.codec import Codec
from lightning_decentral.shared.compute.layout import ModelLayout
from lightning_decentral.shared.plan.arguments import at_least
from lightning_decentral.shared.wire.agreement import start_from_worker_0
from lightning_decentral.shared.wire.objects import gather_rows
from lightning_decentral.shared.wire.transport import Wire


def check_numbers(delay: int, heals: int, bucket_bytes: int | None, exact_steps: float = 0) -> None:
    """Raise ValueError for a number that is out of range for every gossip strategy."""
    at_least(0, "0 blocks, 1 overlaps, k mixes k updates later", delay=delay)
    at_least(0, "3 is the default, 0 ends the training", heals=heals)
    check_bucket_bytes(bucket_bytes)
    at_least(0, "0 begins with the rule", exact_steps=exact_steps)
    if exact_steps > 1 and not float(exact_steps).is_integer():  # nor is infinity
        raise ValueError(
            f"exact_steps must be whole steps or a share of the run, got {exact_steps}: give 100, or 0.1 for a tenth"
        )


def exact_steps_of(asked: float, module: Any, broadcast: Callable[[float], float]) -> int:
    """Number of exact steps: `asked`, or below 1 that share of the steps that worker 0 estimates for the run. A share
    makes the call collective, and needs a module with a trainer. ValueError: a share of a run without a known end."""
    if asked >= 1 or not asked:
        return int(asked)
    steps = module.trainer.estimated_stepping_batches
    if not 0 <= steps < inf:
        raise ValueError(
            f"exact_steps={asked} is a share of the run, and this run has no known end: give a number of steps, or set "
            "the Trainer's max_steps"
        )
    return round(asked * broadcast(float(steps)))


@dataclass(frozen=True)
class MixerBuilder:
    """Builds one worker's mixers from the settings, its connections and its island."""

    plan: GossipPlan
    wire: Wire  # connection to the other workers' devices
    member: IslandMember  # this device as a member of its island
    device: torch.device
    module: nn.Module  # the model whose parameters are mixed
    layout: ModelLayout = field(default_factory=ModelLayout)  # layout of the parameters when workers were compared

    def making(
        self, exact_steps: int = 0, meet: Callable[[Sequence[nn.Parameter]], None] = lambda parameters: None
    ) -> MixerFactory:
        """Return the factory that the run's `Mixers` make mixers with; `meet`: sets x to the mean that is evaluated."""
        own, world = (self.mixers, self.pack, self.of_states), self.wire.world
        # Not by a strategy's `mean_of`, which would be counted as one of Lightning's collective calls, not as a round.
        mean = partial(self.member.mean_of_sound, world=world)
        alike = partial(self.member.alike, take=partial(start_from_worker_0, over=world, device=self.device))
        return MixerFactory(*own, exact_steps, mean, self.layout, alike, meet)

    def mixers(self) -> list[Mixer]:
        """Make the mixers of one optimizer, one for each fragment. Collective."""
        return [self._mixer(part, self.plan.combine, self.plan.codec) for part in self.plan.topology.fragments]

    def of_states(self, optimizer: Optimizer) -> list[StateMixer]:
        """Make the mixers of those optimizer states that are mixed with the parameters. Collective."""
        along, states = self.plan.topology, self.plan.states.items()
        mixers = [self._mixer(travel.along(along), travel.combine, travel.codec) for _, travel in states]
        named = zip(states, mixers, strict=True)
        return [StateMixer(optimizer, name, mixer, self.pack_state, self._everyone) for (name, _), mixer in named]

    def pack(self, parameters: Sequence[nn.Parameter]) -> list[Bucket]:
        buckets = self.member.pack(parameters, self.plan.bucket_bytes)
        refuse_stale(self.plan.codec, self.plan.combine, buckets)
        return buckets

    def pack_state(self, optimizer: Optimizer, name: str, chosen: Mapping[nn.Parameter, int]) -> list[Bucket]:
        self.layout.restore(chosen)
        return pack_states(optimizer, name, chosen, self.plan.bucket_bytes, self.plan.island.devices)

    def _everyone(self, row: list[int]) -> list[list[int]]:
        """Gather each worker's row. Collective; over `world`, as a worker that has ended its epoch waits on `roll`."""
        rows: list[list[int]] = gather_rows(self.wire.world, torch.tensor(row, device=self.device)).tolist()
        return rows

    def _mixer(self, topology: Topology, combine: Rule, codec: Codec) -> Mixer:
        plan, member, world = self.plan, self.member, self.wire.world
        workers, worker = world.size // member.devices, world.rank // member.devices
        cliques = cliques_of(codec, combine, topology, plan.weights, workers)
        exchange = assembled(topology, plan.weights, workers, worker, member, self.device, codec, plan.delay, cliques)
        mixer = mixer_of(combine, exchange, plan.delay, partial(self.wire.group, None))
        mixer.healing = healing(plan.heals if member.heals else 0, self.module)
        return mixer


def refuse_stale(codec: Codec, combine: Rule, buckets: Sequence[Bucket]) -> None:
    """Raise ValueError if the mixing rate exceeds the share of a difference that the codec transmits per round."""
    if not (codec.remembers and buckets):
        return
    rate = combine.largest_rate
    arrives = min(share_that_arrives(codec, bucket.flat.dtype) for bucket in buckets)
    if arrives < RULE_OF_THUMB * rate:
        raise ValueError(
            f"{codec} transmits about {arrives:.2g} of a difference per round, less than the mixing rate {rate:.3g} of "
            f"{combine}: workers would diverge. Use Gossip(rate={max(arrives, 0.01):.1g}), or a codec that sends more"
        )


def place(plan: GossipPlan, per_node: int, workers: int) -> None:
    """Adapt the plan's topology and rule to the number of workers and workers per node, then `check` the plan."""
    plan.topology = plan.topology.placed(per_node)
    plan.combine = plan.combine.placed(plan.topology.fragments[0], workers)
    check(plan, workers)


def check(plan: GossipPlan, workers: int) -> None:
    """Raise ValueError, with a remedy, if rule, topology and states don't fit together; without communication."""
    refuse_overshoot(plan.codec, plan.combine)
    for fragment in plan.topology.fragments:
        plan.combine.check(fragment, workers, plan.weights, plan.delay)
    check_states(plan, plan.topology, workers)


def check_states(plan: GossipPlan, topology: Topology, workers: int) -> None:
    """Raise ValueError if an optimizer state can't be mixed on this topology, by that many workers."""
    for name, travel in plan.states.items():
        if plan.island.shards > 1 or len(topology.fragments) > 1:
            where = f"an island that shards ({plan.island!r})" if plan.island.shards > 1 else f"{topology!r}"
            raise ValueError(f"optimizer states can't be mixed with {where}: leave {name!r} out of states")
        try:
            travel.check(topology, workers, plan.weights, plan.delay)
        except ValueError as error:
            text = str(error).replace("Gossip(rate", "Travel(rate")
            raise ValueError(f"the optimizer state {name!r} can't be mixed so: {text}") from None
