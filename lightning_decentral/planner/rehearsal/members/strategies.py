"""What a strategy does between workers, without Lightning's loop: to gradients, and to parameters after the update.

The parts are the strategies' own: gossip's rounds and mixers, averages of gradients (`averaging`), the cuts of partial
backprop (`partial`). `ddp` is the exact average.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial, singledispatch
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch.optim import Optimizer

from lightning_decentral.compressed.strategy import CompressedStrategy
from lightning_decentral.gossip.compute.combine.rule import Rule
from lightning_decentral.gossip.compute.travel import Travel
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import Weights
from lightning_decentral.gossip.rounds import Rounds, check
from lightning_decentral.gossip.strategy import GossipStrategy
from lightning_decentral.gossip.wire.exchange import Exchange
from lightning_decentral.gossip.wire.island import Island
from lightning_decentral.gossip.wire.island_member import IslandMember
from lightning_decentral.gossip.wire.making import Making
from lightning_decentral.gossip.wire.optimizers import Mixers
from lightning_decentral.partial.strategy import PartialBackpropStrategy
from lightning_decentral.planner.rehearsal.members.averaging import Averaging, Replicas
from lightning_decentral.planner.rehearsal.members.member import Member, Place
from lightning_decentral.planner.rehearsal.members.partial import Cutting
from lightning_decentral.shared.compute.codec.codec import Codec
from lightning_decentral.shared.compute.layout.model import ModelLayout
from lightning_decentral.shared.nonfinite import GradientCheck
from lightning_decentral.shared.wire.transport import Wire

SERVED = {"find_unused_parameters", "gradient_as_bucket_view", "bucket_cap_mb", "static_graph"}
"""Options of ddp's wrapper that change no bit, or are heeded."""
TAKE = "take gossip, compressed, partial_backprop or ddp"


@singledispatch
def member_of(strategy: object, module: LightningModule, optimizer: Optimizer, place: Place) -> Member:
    """A worker's part of this strategy, which is only read.

    Raises:
        ValueError: it can't be rehearsed, or can't serve so many workers.
    """
    raise ValueError(f"{type(strategy).__name__} can't be rehearsed: {TAKE}")


@member_of.register
def _(strategy: DDPStrategy, module: LightningModule, optimizer: Optimizer, place: Place) -> Member:
    # Others of its kind (pipelines) aren't ddp.
    if type(strategy) is not DDPStrategy:
        raise ValueError(f"{type(strategy).__name__} can't be rehearsed: {TAKE}")
    hook = {"ddp_comm_hook"} if strategy._ddp_comm_hook is not None else set()
    if asked := sorted((strategy._ddp_kwargs.keys() | hook) - SERVED):
        raise ValueError(f"DDPStrategy with {asked[0]} can't be rehearsed: leave it out")
    return Replicas(module, place, finds_unused=bool(strategy._ddp_kwargs.get("find_unused_parameters")))


@member_of.register
def _(strategy: CompressedStrategy, module: LightningModule, optimizer: Optimizer, place: Place) -> Member:
    if strategy.orthogonal is not None:  # one worker's update serves all here
        raise ValueError("a rehearsal makes one update for all workers: leave orthogonal out")
    strategy.refuse(module, fitting=True)
    return Averaging(module, place, strategy.codec, strategy.bucket_bytes, GradientCheck(strategy.nonfinite))


@member_of.register
def _(strategy: PartialBackpropStrategy, module: LightningModule, optimizer: Optimizer, place: Place) -> Member:
    strategy.refuse(module, fitting=True)
    return Cutting(strategy, module, optimizer, place)


@member_of.register
def _(strategy: GossipStrategy, module: LightningModule, optimizer: Optimizer, place: Place) -> Member:
    if strategy.island.devices > 1:
        raise ValueError(f"workers of one device are rehearsed, not {strategy.island}: leave island out")
    strategy.refuse(module, fitting=True)
    return Gossiping(strategy, module, optimizer, place)


class SendsNothing:
    """In the place of a strategy: workers that send nothing."""


class SilentMember(Member):
    """Its gradients are its own, and so is its update."""

    drifts: ClassVar[bool] = True

    def begin(self) -> None:
        """Nothing to make."""

    def average(self) -> None:
        """Nothing to send."""

    def mix(self) -> None:
        """Nothing to send."""

    def release(self) -> None:
        """Nothing was made."""

    @property
    def sent_bytes(self) -> float:
        return 0.0


@member_of.register
def _(strategy: SendsNothing, module: LightningModule, optimizer: Optimizer, place: Place) -> Member:
    return SilentMember()


class AtOnce(IslandMember):
    """A device that is a worker by itself, whose messages take no time that they could be hidden in."""

    def beside(self, peers: Exchange[Any], device: torch.device, delay: int) -> Exchange[Any]:
        return peers


@dataclass
class Placed:
    """A gossip strategy's values at one place: what `Rounds` asks for."""

    topology: Topology
    combine: Rule
    weights: Weights
    codec: Codec
    states: Mapping[str, Travel]
    island: Island
    delay: int
    bucket_bytes: int | None
    heals: int
    member: IslandMember
    wire: Wire | None
    workers: int
    worker: int
    root_device: torch.device


def placed(of: GossipStrategy, place: Place) -> Placed:
    """As the strategy's set-up does it."""
    topology = of.topology.placed(place.per_node)
    combine = of.combine.placed(topology.fragments[0], place.workers)
    values = topology, combine, of.weights, of.codec, of.states, of.island, of.delay, of.bucket_bytes, of.heals
    member = AtOnce(place.wire, of.island.devices, lambda call: call())
    return Placed(*values, member, place.wire, place.workers, place.worker, place.device)


class Gossiping(Member):
    """The mixers of a worker."""

    drifts: ClassVar[bool] = True

    def __init__(self, strategy: GossipStrategy, module: LightningModule, optimizer: Optimizer, place: Place) -> None:
        self._plan, self._place, self._optimizer = placed(strategy, place), place, optimizer
        check(self._plan)
        asked, layout = strategy.exact_steps, ModelLayout(module.parameters())
        exact = int(asked) if asked >= 1 else round(asked * place.steps)
        rounds = Rounds(self._plan, module, layout)
        of_sound = partial(self._plan.member.mean_of_sound, world=place.wire.world)
        making = Making(rounds.mixers, rounds.pack, rounds.of_states, exact, of_sound)
        self._mixers = Mixers(lambda: making)

    def begin(self) -> None:
        self._mixers.adopt(self._optimizer)

    def average(self) -> None:
        """Gradients are a worker's own."""

    def mix(self) -> None:
        self._mixers.step(self._optimizer)

    def release(self) -> None:
        self._mixers.release()

    @property
    def sent_bytes(self) -> float:
        return sum(of.traffic().bytes_sent for of in self._mixers)
