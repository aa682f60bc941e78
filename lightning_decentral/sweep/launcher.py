"""Hydra launcher `shard_parallel`: turns Hydra's overrides into members, runs them as a sweep, and reports the end."""

import json
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, configure_log, filter_overrides, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict, read_write
from rich.table import Table

from lightning_decentral.shared.compute import cuda
from lightning_decentral.shared.plan.timeline import Span, chrome_trace, later, read_chrome_trace, write_chrome_trace
from lightning_decentral.sweep import gantt
from lightning_decentral.sweep import progress as table
from lightning_decentral.sweep.member import SCORES, SweepMember, read_record, read_scores, width_of
from lightning_decentral.sweep.plan.arbiter import Arbiter
from lightning_decentral.sweep.plan.policy import Policy, Scoreboard
from lightning_decentral.sweep.processes import fork, run_member, spawn
from lightning_decentral.sweep.server import Starts, Sweep

log = logging.getLogger(__name__)

TRACE = "trace.json"
FACTORIES = "lightning.pytorch.callbacks_factory"

Devices = int | Sequence[str] | None  # a number, names, or None: every GPU, or the whole CPU


Ended = tuple[Mapping[str, JobReturn], Mapping[str, Span]]
"""(outcome of each member, spans of the members' time on devices by `time.perf_counter`)."""


class Carrier:
    """Carries out the members of one batch on devices; here an arbiter lets them take turns, in the policy's order.

    `hydra.launcher.policy` may name another class than this one, which gets that name in place of a policy."""

    planned: Mapping[str, Span] = MappingProxyType({})  # as the spans of `run`, where a plan has them
    shown: Table | None = None  # what was planned beside what happened
    width = 1  # devices that each member has at a time, as a rule: so many fewer are alive at once

    def __init__(self, devices: Devices, memory_bytes: int | None, policy: Policy, quantum_seconds: float) -> None:
        if memory_bytes is not None and memory_bytes < 1:
            raise ValueError(
                f"hydra.launcher.memory_bytes={memory_bytes}: give each device at least 1, or null for no limit"
            )
        if not quantum_seconds > 0:
            raise ValueError(f"hydra.launcher.quantum_seconds={quantum_seconds}: use more than 0")
        self.devices, self.title = slots(devices, cuda.device_count()), f"{type(policy).__name__} first"
        self.arbiter = Arbiter(policy, self.devices, memory_bytes=memory_bytes, quantum_seconds=quantum_seconds)

    def refuse(self, members: Sequence[SweepMember]) -> None:
        """Raise ValueError for a member that can't be carried out, before any of them starts."""
        for member in members:
            self.arbiter.refuse_wider(member.name, member.width)

    def run(self, members: Sequence[SweepMember], starts: Starts, alive_per_device: int, scores: Scoreboard) -> Ended:
        """Run all members to their end, on any device; scores are added to those of members that ran earlier."""
        with table.LiveTable() as watcher:
            alive = alive_per_device * len(self.devices) // self.width
            sweep = Sweep(members, self.arbiter, starts, watcher, alive, scores)
            outcomes = sweep.run()
        return outcomes, later(self.arbiter.spans(), sweep.began)


class Launch:
    """Runs a sweep for Hydra: the sweeper's jobs may come in batches, each when the batch before has ended. The
    options of `ShardParallelLauncher` make a carrier for each batch."""

    def __init__(self, *, alive_per_device: int, resume: bool, checkpoint: str) -> None:
        self._resume, self._checkpoint = resume, checkpoint
        self._alive_per_device = alive_per_device
        self._scores = Scoreboard()
        self._members: list[SweepMember] = []
        self._outcomes: dict[str, JobReturn] = {}
        self._spans: dict[str, Span] = {}
        self._planned: dict[str, Span] = {}
        self._began = time.perf_counter()

    def __call__(
        self,
        carrier: Carrier,  # of this batch
        hydra_context: HydraContext,
        task_function: TaskFunction,
        config: DictConfig,
        job_overrides: Sequence[Sequence[str]],
        initial_job_idx: int,
    ) -> list[JobReturn]:
        """Return the outcome of each job of a batch, in order. ValueError: nothing to run, or a job that no device of
        this sweep can run."""
        if not job_overrides:
            raise ValueError("the sweep is empty: a value list such as optimizer.lr=1e-3,3e-4 has no values")
        setup_globals()
        configure_log(config.hydra.hydra_logging, config.hydra.verbose)
        refuse_without_gate()
        numbered = enumerate(job_overrides, start=initial_job_idx)
        members = [_member(hydra_context, config, list(overrides), number) for number, overrides in numbered]
        carrier.refuse(members)
        folder = Path(str(config.hydra.sweep.dir))
        done = self._taken_up(members, folder) if self._resume else {}
        for member in [] if self._resume else members:
            (member.folder / SCORES).unlink(missing_ok=True)  # scores of an earlier sweep in this folder
        self._members += members
        self._outcomes |= done
        left = [member for member in distinguished(members) if member.name not in done]
        self._run(left, carrier, starts_on(carrier.devices, hydra_context, task_function))
        self._report(distinguished(self._members), left, folder)
        return [self._outcomes[member.name] for member in members]

    def _run(self, left: list[SweepMember], carrier: Carrier, starts: Starts) -> None:
        log.info(f"Launching {len(left)} jobs on {', '.join(carrier.devices)}, {carrier.title}")
        if not left:
            return
        for member in left:
            log.info(f"\t{member.title}")
        outcomes, ran = carrier.run(left, starts, self._alive_per_device, self._scores)
        self._outcomes |= outcomes
        self._planned |= later(carrier.planned, -self._began)
        if carrier.shown is not None:
            table.LiveTable().console.print(carrier.shown)
        spans = later(ran, -self._began)
        # A resumed member has spans of its earlier run.
        numbered = enumerate(spans.items(), start=len(self._spans))
        self._spans |= {f"{name.rpartition('/')[0]}/{number}": span for number, (name, span) in numbered}

    def _taken_up(self, members: list[SweepMember], folder: Path) -> dict[str, JobReturn]:
        """Return outcomes of an earlier run; other members resume from their last checkpoint, if they can."""
        if not self._members:  # the first batch; later ones may not have begun
            if not any(member.log.exists() for member in members):
                raise ValueError(f"nothing to resume in {folder}: name the sweep's folder with hydra.sweep.dir=...")
            # The chart keeps the spans of the sweep so far; new spans come after them.
            if (folder / TRACE).exists():
                self._spans = read_chrome_trace(folder / TRACE)
                self._began -= max((span.finish for span in self._spans.values()), default=0.0)
        done = {}
        for member in members:
            read_scores(member, self._scores)
            outcome = read_record(member)
            # Lightning names a second file last-v1.ckpt: the newest counts.
            last = max(member.folder.rglob("last*.ckpt"), key=lambda path: path.stat().st_mtime, default=None)
            if outcome is not None and outcome.status is JobStatus.COMPLETED:
                done[member.name], state = outcome, "finished before"
            elif last is None:
                state = "from its start (no last.ckpt in its folder)"
            elif self._checkpoint not in member.config:
                state = f"from its start (no key {self._checkpoint} takes one)"
            else:
                with open_dict(member.config), read_write(member.config.hydra.overrides.hydra):
                    member.config[self._checkpoint] = str(last)
                    # A carrier may compose it again: this list counts before the member's own.
                    quoted = json.dumps(str(last), ensure_ascii=False)
                    member.config.hydra.overrides.hydra.append(f"{self._checkpoint}={quoted}")
                state = f"from {last}"
            log.info(f"\t{member.title} : {state}")
        return done

    def _report(self, known: list[SweepMember], ended: list[SweepMember], folder: Path) -> None:
        """Show and write the ranking of all members so far, and the Gantt chart, next to the members' folders."""
        ranked = table.standings(known, self._outcomes, self._scores)
        table.write_ranking(ranked, folder / "ranking.csv")
        console = table.LiveTable().console
        console.print(table.ranking(ranked))
        write_chrome_trace(chrome_trace(self._spans, "sweep"), folder / TRACE)
        try:
            panels = {"Planned": self._planned, "Members of the sweep by device": self._spans}
            drawn = {
                title: gantt.bars_of_sweep(spans) for title, spans in panels.items() if spans or spans is self._spans
            }
            gantt.draw(drawn, folder / "gantt.png")
        except ValueError as error:
            log.info(f"no gantt.png: {error}")
        log.info(f"ranking, trace and Gantt chart: {folder}")
        for member in ended:
            if self._outcomes[member.name].status is JobStatus.FAILED:
                log.error(f"member {member.name} ({' '.join(member.own_overrides)}) failed, its log: {member.log}")
        if (best := table.best_line(ranked)) is not None:
            console.print(best, markup=False, highlight=False, soft_wrap=True)


def slots(devices: Devices, gpus: int) -> tuple[str, ...]:
    """Return the devices' names: those given, n GPUs, or without GPUs n equal parts of the CPU. None: every GPU or the
    whole CPU. ValueError: fewer than one, more than exist, named twice, or of another kind."""
    count = max(1, gpus) if devices is None else devices
    if isinstance(count, int):
        if count < 1:
            raise ValueError(f"hydra.launcher.devices={count}: a sweep needs at least 1")
        if 0 < gpus < count:
            raise ValueError(
                f"hydra.launcher.devices={count}, but this machine has {gpus} GPU(s): use {gpus}, or name parts of the "
                f"processor: hydra.launcher.devices=[{','.join(['cpu'] * count)}]"
            )
        count = ["cuda" if gpus else "cpu"] * count
    found = [name if ":" in name else f"{name}:{i}" for i, name in enumerate(count)]
    known = {f"cuda:{i}" for i in range(gpus)}
    wrong = [name for name in found if name not in known and name.partition(":")[0] != "cpu"]
    if not found or wrong or len(set(found)) < len(found):
        there = ", ".join(sorted(known)) or "no GPU"
        raise ValueError(
            f"hydra.launcher.devices={list(count)}: name each device once, from cpu and those that exist ({there})"
        )
    return tuple(found)


def refuse_without_gate() -> None:
    """Raise ValueError if the package was installed without the entry point by which members ask for their device."""
    if not entry_points(group=FACTORIES, name="shard_parallel"):
        raise ValueError(f"lightning-decentral is installed without the entry point {FACTORIES}: run pip install again")


def distinguished(members: Sequence[SweepMember]) -> list[SweepMember]:
    """Give each member its own overrides: those that not all members have."""
    shared = set.intersection(*(set(member.own_overrides) for member in members)) if len(members) > 1 else set()
    return [replace(m, own_overrides=tuple(o for o in m.own_overrides if o not in shared)) for m in members]


def starts_on(devices: Sequence[str], hydra_context: HydraContext, task_function: TaskFunction) -> Starts:
    """Choose how members' processes start on these devices: by fork, or by spawn where a fork can't work."""
    # A fork has none of this process's threads, and can't use a GPU that this process has asked about.
    tasks = Path("/proc/self/task")  # also threads of libraries, which `threading` doesn't count
    alone = tasks.exists() and len(os.listdir(tasks)) == 1 and threading.active_count() == 1
    on_gpus = any(name.startswith("cuda") for name in devices)
    return partial(fork if alone and not on_gpus else spawn, partial(run_member, hydra_context, task_function))


def _member(hydra_context: HydraContext, config: DictConfig, overrides: list[str], number: int) -> SweepMember:
    """Make the member of these overrides, as Hydra's basic launcher would run it."""
    one = hydra_context.config_loader.load_sweep_config(config, overrides)
    with open_dict(one):
        one.hydra.job.id, one.hydra.job.num = str(number), number
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(one)  # folder names may use ${hydra:...}
    try:
        folder = Path(str(one.hydra.sweep.dir)) / str(one.hydra.sweep.subdir)
    finally:
        HydraConfig.instance().cfg = before
    return SweepMember(str(number), tuple(filter_overrides(overrides)), one, folder.absolute(), width_of(one))
