"""Each strategy's communication between workers, without Lightning's loop: of gradients, or of updated parameters.

They use the strategies' own parts: gossip's rounds and mixers, averages of gradients (`member`), partial backprop's
cuts, depths and reducer. `ddp` is the exact average."""

from contextlib import AbstractContextManager
from copy import copy
from functools import singledispatch
from typing import Any, ClassVar

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.optim import Optimizer

from lightning_decentral.compressed.strategy import CompressedStrategy
from lightning_decentral.gossip.mixer_builder import MixerBuilder, place
from lightning_decentral.gossip.strategy import GossipStrategy
from lightning_decentral.gossip.wire.island_member import IslandMember
from lightning_decentral.gossip.wire.making import parameters_of
from lightning_decentral.gossip.wire.optimizers import Mixers
from lightning_decentral.partial.agreed import found_together, refuse_unserved, run_of
from lightning_decentral.partial.compute.search import search
from lightning_decentral.partial.strategy import PartialBackpropStrategy
from lightning_decentral.partial.wire.depth_controller import CutSteps, DepthController
from lightning_decentral.partial.wire.reducer import Rank
from lightning_decentral.planner.rehearsal.member import AveragingMember, DDPMember, Member, MemberPlace, ReplicaMember
from lightning_decentral.shared.compute.layout import ModelLayout
from lightning_decentral.shared.updates import BeforeUpdate, GradientCheck

SERVED = {"find_unused_parameters", "gradient_as_bucket_view", "bucket_cap_mb", "static_graph"}
"""Options of ddp's wrapper that don't change results, or that a rehearsal supports."""


@singledispatch
def member_of(strategy: object, module: LightningModule, optimizer: Optimizer, at: MemberPlace) -> Member:
    """Make a worker's member for this strategy, which is only read; None: workers that send nothing. ValueError: the
    strategy can't be rehearsed, or can't serve the number of workers."""
    raise ValueError(f"{type(strategy).__name__} can't be rehearsed: take gossip, compressed, partial_backprop or ddp")


@member_of.register
def _(strategy: DDPStrategy, module: LightningModule, optimizer: Optimizer, at: MemberPlace) -> Member:
    # Subclasses of DDPStrategy, such as pipelines, aren't ddp.
    if type(strategy) is not DDPStrategy:
        return member_of.dispatch(object)(strategy, module, optimizer, at)
    hook = {"ddp_comm_hook"} if strategy._ddp_comm_hook is not None else set()
    if asked := sorted((strategy._ddp_kwargs.keys() | hook) - SERVED):
        raise ValueError(f"DDPStrategy with {asked[0]} can't be rehearsed: leave it out")
    return DDPMember(module, at, finds_unused=bool(strategy._ddp_kwargs.get("find_unused_parameters")))


@member_of.register
def _(strategy: CompressedStrategy, module: LightningModule, optimizer: Optimizer, at: MemberPlace) -> Member:
    if strategy.orthogonal is not None:  # one worker's update is used by all
        raise ValueError("a rehearsal makes one update for all workers: leave orthogonal out")
    strategy.refuse(module, fitting=True)
    return AveragingMember(module, at, strategy.codec, strategy.bucket_bytes, GradientCheck(strategy.nonfinite))


@member_of.register
def _(strategy: PartialBackpropStrategy, module: LightningModule, optimizer: Optimizer, at: MemberPlace) -> Member:
    strategy.refuse(module, fitting=True)
    return CutMember(strategy, module, at)


@member_of.register
def _(strategy: GossipStrategy, module: LightningModule, optimizer: Optimizer, at: MemberPlace) -> Member:
    if strategy.island.devices > 1:
        raise ValueError(f"workers of one device are rehearsed, not {strategy.island}: leave island out")
    strategy.refuse(module, fitting=True)
    return Gossiping(strategy, module, optimizer, at)


class CutMember(ReplicaMember):
    """Member of partial backprop: its backward stops at a cut, and all workers take the same update. ValueError: here
    for workers with unequal batches, or a module whose backward isn't Lightning's; in the first forward for a model
    that can't be cut (with the reason)."""

    concurrent: ClassVar[bool] = False  # each worker's graph ends at a cut of its own

    def __init__(self, strategy: PartialBackpropStrategy, module: LightningModule, place: MemberPlace) -> None:
        refuse_unserved(module)
        self._strategy, self._steps = strategy, CutSteps(strategy.absent)
        super().__init__(module, place, GradientCheck(strategy.nonfinite, self._steps.settle))
        self._depth = strategy.depth.timed(place.steps)
        if len({self._depth.share(rank, place.workers) for rank in range(place.workers)}) > 1:
            raise ValueError(f"{self._depth} asks for unequal batches, which a rehearsal has not: take Staircase")

    def forward(self, step: int, *batch: Any) -> AbstractContextManager[None]:
        driver = self._steps.driver
        if driver is None:  # cuts are found at the first batch
            at, own, run = self._place, self._strategy, run_of(self._module.trainer, *batch)

            def find() -> Any:  # by worker 0 alone, as the other workers' turns come later
                return search(self._module, own.cuts, own.balance, run) if at.worker == 0 else None

            plan = found_together(lambda mine: [at.broadcast(mine)], lambda decide: decide(find))
            driver = DepthController(self._module, plan, self._depth, Rank(at.worker, (1 / at.workers,) * at.workers))
            self._steps.drive(driver, at.wire, self._equal, own.bucket_bytes)
        return driver.together(step)

    def backward(self) -> None:
        self._steps.begin()

    def average(self) -> None:
        self._steps.end()

    def release(self) -> None:
        self._steps.close()
        super().release()

    @property
    def sent_bytes(self) -> float:
        return self._steps.sent_bytes


@member_of.register
def _(strategy: None, module: LightningModule, optimizer: Optimizer, at: MemberPlace) -> Member:
    return Member()


class LoneDevice(IslandMember):
    """Worker of one device without overlap, as messages in one process take no time."""

    overlaps = False


class Gossiping(Member):
    """Member of gossip, with mixers made as by the strategy."""

    def __init__(
        self, strategy: GossipStrategy, module: LightningModule, optimizer: Optimizer, at: MemberPlace
    ) -> None:
        self._optimizer, self._in_turn, self._trained = optimizer, at.in_turn, set[nn.Parameter]()
        plan = copy(strategy)  # a copy: the strategy is only read, and placing changes the plan
        place(plan, at.per_node, at.workers)
        asked = strategy.exact_steps
        exact = int(asked) if asked >= 1 else round(asked * at.steps)
        member = LoneDevice(at.wire, 1, lambda call: call())
        rounds = MixerBuilder(plan, at.wire, member, at.device, module, ModelLayout(module.parameters()))
        self._mixers = Mixers(lambda: rounds.making(exact))
        self.check = BeforeUpdate(self._adopt)

    def begin(self) -> None:
        self._adopt(self._optimizer)

    def _adopt(self, optimizer: Optimizer) -> None:
        """Add new parameters before the update, as the strategy does; unfrozen parameters are set to their mean."""
        trained = {p for p in parameters_of(optimizer) if p.requires_grad or p.grad is not None}
        if not trained <= self._trained:
            self._in_turn()
            self._trained |= trained
        self._mixers.adopt(optimizer)

    def mix(self) -> None:
        self._mixers.step(self._optimizer)

    def release(self) -> None:
        self._mixers.release()

    @property
    def sent_bytes(self) -> float:
        return sum(each.traffic().bytes_sent for each in self._mixers)
