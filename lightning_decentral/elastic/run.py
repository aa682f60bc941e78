"""Elastic run: workers join and leave; each is one process (or one per device) with its own Trainer; a lobby connects.

Lightning sees one process in each worker; only this strategy knows the other workers. What Lightning computes once for
all workers is the mean of all of them, and what Lightning does on rank 0 is done by the oldest member."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer

from lightning_decentral.elastic import checks, loops
from lightning_decentral.elastic.dealt_loaders import Joining, refuse_combined
from lightning_decentral.elastic.fragments import Exchanges
from lightning_decentral.elastic.late_tensors import LateTensors, refuse_pruning
from lightning_decentral.elastic.plan.dealing import Calendar
from lightning_decentral.elastic.process import take_over
from lightning_decentral.elastic.watched import WatchedProcess
from lightning_decentral.elastic.wire.participant import Participant
from lightning_decentral.elastic.wire.rounds.commits import Commits
from lightning_decentral.elastic.wire.rounds.holding import Holding
from lightning_decentral.gossip.compute.combine.combine import Rule
from lightning_decentral.gossip.compute.travel import Travel
from lightning_decentral.gossip.mixer_builder import check_numbers
from lightning_decentral.gossip.wire.making import MixerFactory, parameters_of
from lightning_decentral.gossip.wire.optimizers import Mixers
from lightning_decentral.shared.compute.layout import ModelLayout, described
from lightning_decentral.shared.updates import Updates
from lightning_decentral.shared.wire.mean import MeanModel
from lightning_decentral.shared.wire.transport import Wire


class ElasticRun(WatchedProcess):
    """Mixin that makes a strategy elastic; list it before that strategy among the base classes."""

    drifts: ClassVar[bool] = True
    model_layout: ModelLayout  # layout of this device's part of the model
    _joining: Joining
    bucket_bytes: int | None
    batches = 1  # number of batches that the devices of this worker take in a step
    part = 0  # index of this device's part of the model among the worker's parts
    states: Mapping[str, Travel] = MappingProxyType({})  # optimizer states that travel with the parameters
    exact_steps = 0.0  # number of first steps after which all members are averaged instead

    def plan_rounds(self, rule: Rule) -> None:
        """Plan by the constructor's values. ValueError for one that elastic runs don't support; the error names it."""
        check_numbers(self.delay, self.heals, self.bucket_bytes, self.exact_steps)
        plan = self.topology, self.weights
        self.combine = checks.elastic_rule(rule, *plan, self.codec, self.delay, self.elastic)
        self.mean_model = MeanModel(self._mean_and_carried, self.shown)
        self.mean_model.hidden = lambda written: self._mixers.note(written)
        self._held = Holding(torch.device("cpu"))
        self._mixers = Mixers(self._making)
        self._member: Participant | None = None
        self._committed = checks.committed_rule(self.combine, *plan, self.elastic.workers[1])
        self._exchanges: Exchanges | None = None
        self.followed = self
        self._updates: Updates | None = None
        self._watched = ExitStack()
        self._late: LateTensors | None = None
        self._given = checks.JoinCheck({}, {})

    # ---- what the strategy adds -------------------------------------------------------------------------------------

    @abstractmethod
    def holding(self, member: Participant) -> Holding:
        """Make the `Holding`, which keeps this device's part of the model and mixes it."""

    @abstractmethod
    def whole(self, own: dict[str, Any]) -> dict[str, Any]:
        """Join the devices' checkpoints into one for a newcomer, on the first device. Collective in this worker."""

    @property
    def watched_module(self) -> nn.Module:
        """Module in which all devices of all members register the same new parameters and buffers during training."""
        return self._module

    def parts(self, own: checks.Part) -> Sequence[checks.Part]:
        """Return the parts of this worker's model: one per pipeline stage, else one. Collective among its devices."""
        return [own]

    def gradients(self, closure: Callable[[], Any], optimizer: Optimizer) -> Callable[[], Any]:
        """Return the closure that computes the gradients of an optimizer step."""
        return closure

    # ---- set-up -----------------------------------------------------------------------------------------------------

    def refuse(self, module: nn.Module, fitting: bool) -> None:
        super().refuse(module, fitting)
        self._described = described(module) if fitting else {}
        if fitting and loops.manual(self._module.trainer) and (self.devices > 1 or self.elastic.asynchronous):
            raise ValueError("elastic workers of several devices, and asynchronous rounds, need automatic optimization")
        if fitting:
            refuse_pruning(self._module.trainer)

    def setup_environment(self) -> None:
        workers = self._beside or self.elastic.workers[1]  # members of the first view if all are started
        self._joining = Joining(self.elastic.weight, workers * self.batches, self._begin)
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        """Set up this worker; then copy the training state from a member that trains, if a member does."""
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        checks.refuse_overlap(self.optimizers)
        if self._joining.planned:
            trainer.fit_loop._combined_loader = None  # the loader is made again when the members are known
        own = checks.part_of(self._module, self.optimizers)["present"]
        self._given = checks.JoinCheck(checks.settings_of(self, trainer), self._described, own, self.part)
        self._member, self._early = self._early or self.comes(), None
        votes = self._committed and self._member.leads
        commits = Commits(self._member.worker, self._group.timeout.total_seconds()) if votes else None
        self._watched.callback(commits.close) if commits else None  # while the members are still reached
        self._exchanges = Exchanges(self, self._member, commits)
        self._held = self.holding(self._member)
        value = self._member.healed()
        self._rank_as(int(value is not None or not self._member.leads))
        if value is not None:
            self._take(trainer, value["trainer"])
            self._given.thaw(self._module, value)
        if self._held.mixes:
            self._held.restore(self._mixers, value and value["rule"], self.optimizers)
            self._exchanges.continue_from(value["rule"] if value else {})

    def _take(self, trainer: Trainer, checkpoint: dict[str, Any]) -> None:
        """Restore model, data and callbacks; Lightning itself restores loops, optimizers and schedules."""
        connector = trainer._checkpoint_connector
        connector._loaded_checkpoint = checkpoint
        connector.restore_model()
        connector.restore_datamodule()
        connector.restore_callbacks()

    def _copy(self) -> dict[str, Any]:
        """Copy the training state between two steps, for a newcomer; empty on devices other than the first."""
        assert self._member is not None
        if self._exchanges is None or not self._held.mixes:
            return {}
        own = self._module.trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        whole, parts = self.whole(own), self.parts(checks.part_of(self._module, self.optimizers))
        if not self._member.leads:
            return {}
        own = {"trainer": loops.copied(whole), "rule": self._exchanges.rule(self._mixers)}
        return {**own, **self._given.now(parts), "run": self._member.given()}

    def prepare(self, wire: Wire | None) -> None:
        self._mixers = Mixers(self._making)

    def _making(self) -> MixerFactory:
        assert self._exchanges is not None
        return self._exchanges.making(self._held, self._committed or self.combine)

    # ---- a run ------------------------------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: object) -> object:
        """Make this worker a member and deal it its examples: the last part of a fit's set-up."""
        if not self._module.trainer.training:
            return dataloader
        return self._joining.loader(self._member, self._module.trainer, dataloader)

    def _begin(self, calendar: Callable[[], Calendar] | None = None) -> None:
        """Begin the next round. `calendar` makes the run's calendar, on the oldest of the first members."""
        member, trainer = self._member, self._module.trainer
        assert member is not None
        goes_on = member.calendar if member.live and self.elastic.asynchronous else None
        until = loops.last_to_leave_for(trainer, goes_on, member.round + 1) if goes_on else 0
        left_out = member.begin(self._copy, until)
        if left_out and goes_on:
            loops.leave_out(trainer, goes_on, member.round, left_out)
        assert self._exchanges is not None
        if self._committed and member.entered and member.live:
            self._mixers.settle()  # a newcomer has no part in the round in flight, and begins with the anchor after it
            self._held.mixed(self.counted())
        self._exchanges.enter()
        self._rank_as(member.present().index(member.worker.name) if member.leads else 1)
        if self.global_rank == 0 and not self._logs:
            self._logs = True
            take_over(trainer)
        parts = self.parts(checks.part_of(self._module, self.optimizers))
        state = member.agreed(lambda: self._state(member, calendar, parts))
        if state is not None:
            member.learn(state["run"])
            loops.restored(trainer, state)
            if "given" in state:  # it may have changed since this worker was healed
                self._given.take(self._module, state)
            if "rounds" in state:
                if self._held.mixes:
                    self._exchanges.begin_at(state["rounds"], self._mixers, member.leads)
                self._held.mixed(self.counted())

    def _state(
        self, member: Participant, calendar: Callable[[], Calendar] | None, parts: Sequence[checks.Part]
    ) -> dict[str, Any]:
        """Return the training state for members whose first membership (view) is this one."""
        if member.calendar is None and calendar is not None:
            member.calendar = calendar()
        if member.view is not None and member.view.number == 1:
            return {**loops.NOTHING, "run": member.given()}
        member.knows()  # else it would pass on a history with gaps
        found = {**loops.agreed_states(self._module.trainer), **self._given.now(parts), "run": member.given()}
        if (self._committed or self.states or self.exact_steps) and self._exchanges and self._held.mixes:
            found["rounds"] = self._exchanges.rule(self._mixers)
        return found

    def on_train_start(self) -> None:
        super().on_train_start()
        assert self._member is not None
        assert self._member.calendar is not None
        refuse_combined(self._module.trainer, self._member.calendar)
        self._updates = Updates(self) if self.wire is None else None  # devices of an island record their own
        self._late = LateTensors(self.watched_module)
        for watching in (self._late, self._updates):
            self._watched.callback(watching.close) if watching else None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        member = self._member
        assert member is not None
        assert member.calendar is not None
        if self._updates is not None and member.live:
            self._updates.moved.batch(last=batch_idx == 0)  # the batch before this one
        if not member.live:
            member.live = True  # from now on all members call the same collectives
            step = member.calendar.step(member.round)  # Lightning counts a restart within an epoch as one
            self._module.trainer.fit_loop.epoch_loop._batches_that_stepped = step
        elif member.next_round > member.round:
            self._begin()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        assert self._member is not None
        with self._updates or self._group.coordination.updating, loops.scaled(optimizer, self._member.share):
            output = DDPStrategy.optimizer_step(self, optimizer, self.gradients(closure, optimizer), model, **kwargs)
        self.mean_model.diverged = True
        if not loops.manual(self._module.trainer):
            self.advance(optimizer)
        return output

    def post_training_step(self) -> None:
        """Under manual optimization take a round of each optimizer after a batch, whichever have stepped in it."""
        if loops.manual(self._module.trainer):
            self.advance(*self.optimizers)

    def advance(self, *optimizers: Optimizer) -> None:
        member, late = self._member, self._late
        assert member is not None
        assert late is not None
        with self._group.coordination.waiting:
            if self._held.mixes:
                self._mixers.follow(optimizers)
                steps = member.calendar.step(member.round) if member.calendar else 0
                for mixed in self._mixers:
                    for mixer in (mixed.mixer, *(state.mixer for state in mixed.states)):
                        mixer.round, mixer.steps = member.round, steps
            for optimizer in optimizers:
                if self._held.mixes:
                    self._mixers.step(optimizer)
                self._held.mixed(parameters_of(optimizer))
            late.check(member, waits=self.elastic.asynchronous is None)
            self._mixers.note(())  # copies among this worker's devices aren't writes by user code
            member.next_round = member.round + 1  # the round that began is complete
            self._group.coordination.tick()

    def settle(self) -> None:
        self._mixers.end()
        self._held.mixed(self.counted())  # needed where each worker keeps its own model in the end

    def teardown(self) -> None:
        self._watched.close()
        member, self._member, self._early = self._member or self._early, None, None
        if member is not None:
            member.leave()
        super().teardown()
