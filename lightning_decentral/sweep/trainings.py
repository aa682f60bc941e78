"""Real trainings of a schedule (`schedule --run`): members of a sweep that take a device for each of their batches.

Only training steps are timed, as in a simulation: evaluation is off, and processes have started before the
clock starts."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from hydra import compose, initialize_config_module
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.errors import HydraException
from hydra.types import HydraContext
from omegaconf import open_dict
from omegaconf.errors import OmegaConfBaseException
from rich.table import Table

from lightning_decentral.shared.application import Application
from lightning_decentral.shared.compute import cuda
from lightning_decentral.shared.compute.hardware import cores
from lightning_decentral.shared.errors import one_line
from lightning_decentral.shared.plan.timeline import Span, later
from lightning_decentral.sweep import progress as table
from lightning_decentral.sweep.jigsaw import cores_of, refuse
from lightning_decentral.sweep.launcher import refuse_without_gate, slots, starts_on
from lightning_decentral.sweep.member import MemberFailed, SweepMember, width_of
from lightning_decentral.sweep.plan.arbiter import Arbiter
from lightning_decentral.sweep.plan.dispatch import Processor, Queue, WorkPiece
from lightning_decentral.sweep.plan.gang_arbiter import GangArbiter
from lightning_decentral.sweep.plan.gangs import Gang, Turns
from lightning_decentral.sweep.plan.jobs_file import Training
from lightning_decentral.sweep.plan.policy import Policy, RoundRobin, Scoreboard
from lightning_decentral.sweep.plan.scheduled_arbiter import Scheduled, refuse_early
from lightning_decentral.sweep.plan.simulation import Spans
from lightning_decentral.sweep.server import Sweep
from lightning_decentral.sweep.spase import SpaseCarrier

# Exactly this many steps: an end of the epochs before would end the training.
STEPS_ALONE = ["trainer.max_epochs=-1", "++trainer.limit_val_batches=0", "++trainer.limit_test_batches=0"]
FIRST, MEASURED = 5, 100  # steps that are measured: the first ones one by one, and all together


class Trainings:
    """Trainings of a schedule, which are measured first, then run."""

    measure = "the trainings themselves, from the moment at which all waited for their first step, without evaluation"

    def __init__(
        self,
        trainings: Sequence[Training],
        devices: int,  # number of GPUs, or parts of the CPU
        folder: Path,  # gets each training's folder, and those of the measurements in `measured`
        application: Application,
        measured: int = MEASURED,  # steps of each training that are measured
    ) -> None:
        if measured <= FIRST:
            raise ValueError(f"measured must be more than {FIRST} steps, which are slower than others, got {measured}")
        self._steps = measured
        self._trainings = sorted(trainings, key=lambda training: training.arrival_seconds)
        self._devices, self._folder, self._application = devices, folder, application

    @property
    def announced(self) -> list[str]:
        """Lines that announce what `queues` will measure."""
        unknown = [training.name for training in self._trainings if training.step_seconds is None]
        line = f"measuring {self._steps} steps of {', '.join(unknown)} in {self._folder / 'measured'} ..."
        return [line] if unknown else []

    def queues(self) -> list[Queue]:
        """Return queues for the simulation; step seconds of trainings without a profile are measured, all at once.
        ValueError: an impossible configuration, or a training that failed."""
        known = {t.name: [t.step_seconds] * t.steps for t in self._trainings if t.step_seconds is not None}
        with self._composing():  # mistakes are found before anything runs
            self._members([training for training in self._trainings if training.name in known], self._folder, [])
        if unknown := [training for training in self._trainings if training.name not in known]:
            # Round robin, each for the same number of steps, whose seconds are unknown.
            turns = [Queue(training.name, (WorkPiece(0.0),) * self._steps) for training in unknown]
            arbiter = Scheduled(turns, RoundRobin(), self._slots())
            overrides = [*self._application.unlogged, f"trainer.max_steps={self._steps}"]
            self._through(unknown, arbiter, self._folder / "measured", overrides)
            known |= {t.name: arbiter.step_seconds(t.name, t.steps, first=FIRST) for t in unknown}
        return [training.queue(known[training.name]) for training in self._trainings]

    def rehearse(self, queues: Sequence[Queue], devices: Sequence[Processor], policy: Policy) -> Spans:
        """Run the schedule and return the spans in which each piece ran. ValueError: a training failed, or made fewer
        steps than required."""
        arbiter = Scheduled(queues, policy, self._slots())
        self._through(self._trainings, arbiter, self._folder, [])
        return arbiter.ran(devices)

    def _slots(self) -> tuple[str, ...]:
        gpus = cuda.device_count()
        there = gpus or cores()
        if self._devices > there:
            kind = "GPUs" if gpus else "cores"
            raise ValueError(
                f"{self._devices} training devices need as many {kind}, but there are {there}: lower --devices"
            )
        return slots(self._devices, gpus)

    def _through(self, trainings: Sequence[Training], arbiter: Arbiter, folder: Path, overrides: Sequence[str]) -> None:
        refuse_without_gate()
        with self._composing() as context:
            members = self._members(trainings, folder, overrides)
            starts = starts_on(arbiter.devices, context, self._application.train)
            with _Strict() as live:
                # All processes are alive at once: the arbiter grants nothing before all have asked.
                Sweep(members, arbiter, starts, live, len(members)).run()

    @contextmanager
    def _composing(self) -> Iterator[HydraContext]:
        setup_globals()
        with initialize_config_module(self._application.module, version_base="1.3"):
            yield HydraContext(config_loader=GlobalHydra.instance().config_loader(), callbacks=Callbacks())

    def _members(self, trainings: Sequence[Training], folder: Path, overrides: Sequence[str]) -> list[SweepMember]:
        members = []
        for number, training in enumerate(trainings):
            try:
                every = [*training.overrides, *STEPS_ALONE, *overrides]
                config = compose(self._application.name, every, return_hydra_config=True)
            except (HydraException, OmegaConfBaseException) as error:
                raise ValueError(f"job {training.name}: {one_line(error)}") from None
            with open_dict(config):
                config.hydra.mode = "MULTIRUN"
                config.hydra.job.id, config.hydra.job.num = str(number), number
                config.hydra.sweep.dir, config.hydra.sweep.subdir = str(folder.absolute()), training.name
            there, width = folder.absolute() / training.name, width_of(config)
            members.append(SweepMember(training.name, training.overrides, config, there, width))
        self._refuse(members)
        return members

    def _refuse(self, members: Sequence[SweepMember]) -> None:
        for member in members:
            if (width := member.width) > 1:
                raise ValueError(
                    f"job {member.name} trains on {width} devices, but a piece runs on one: use trainer.devices=1"
                )


class GangTrainings(Trainings):
    """Trainings that JigSaw carries out: each has a worker on every device."""

    measure = "JigSaw's gangs, from the moment at which all waited for their first piece, without evaluation"

    def gangs(self) -> list[Gang]:
        """Measure some steps of all trainings together: the seconds of their pieces. ValueError: as `queues`."""
        arbiter = self._arbiter({})
        overrides = [*self._application.unlogged, f"trainer.max_steps={self._steps}"]
        self._through(self._trainings, arbiter, self._folder / "measured", overrides)
        # Batches that are accumulated are several pieces a step.
        pieces = {t.name: t.steps * max(1, round(arbiter.pieces[t.name] / self._steps)) for t in self._trainings}
        return [Gang(t.name, arbiter.measured[t.name], pieces[t.name]) for t in self._trainings]

    def carry_out(self, turns: Turns) -> Spans:
        """Run the trainings as planned, and return the spans of their pieces. ValueError: as `rehearse`."""
        arbiter = self._arbiter({gang.name: gang.seconds for gang in turns.gangs})
        by_turn = {training.name: training for training in self._trainings}
        self._through([by_turn[turns.gangs[j].name] for j in turns.order], arbiter, self._folder, [])
        for gang in turns.gangs:
            refuse_early(gang.name, arbiter.pieces[gang.name] / gang.iterations)
        return arbiter.ran()

    def _arbiter(self, given: Mapping[str, Sequence[float]]) -> GangArbiter:
        devices = self._slots()
        return GangArbiter(devices, given, [t.name for t in self._trainings], cores_of(devices))

    def _refuse(self, members: Sequence[SweepMember]) -> None:
        refuse(members, self._devices)


class AllocatedTrainings(Trainings):
    """Trainings that SPASE carries out: each on the devices that the plan gives it, from its start to its end."""

    measure = "whole trainings, with their start, without evaluation"

    def carry_out(self, tables: str | Path) -> tuple[Table, dict[str, Span], dict[str, Span]]:
        """Try the trainings without a table in this jobs file, and run all as planned; return a table, and spans as
        planned and as they were. ValueError: as `rehearse`."""
        carrier = SpaseCarrier(self._slots(), None, "spase", 0.25, table=tables, trial_steps=self._steps)
        refuse_without_gate()
        with self._composing() as context:
            members = self._members(self._trainings, self._folder, [])
            carrier.refuse(members)
            starts = starts_on(carrier.devices, context, self._application.train)
            outcomes, ran = carrier.run(members, starts, 1, Scoreboard())
        for member in members:
            _refuse_failed(member, outcomes[member.name])
        assert carrier.shown is not None  # as no member failed
        began = min(span.start for span in carrier.planned.values())
        return carrier.shown, later(carrier.planned, -began), later(ran, -began)


class _Strict(table.LiveTable):
    """Watcher that ends all trainings when one fails: the times of the others wouldn't describe the schedule."""

    def ended(self, member: SweepMember, outcome: JobReturn) -> None:
        super().ended(member, outcome)
        _refuse_failed(member, outcome)


def _refuse_failed(member: SweepMember, outcome: JobReturn) -> None:
    if outcome.status is JobStatus.FAILED:
        why = one_line(MemberFailed.of(outcome._return_value))
        raise ValueError(f"job {member.name} failed, {why}; its log: {member.log}")
