"""SPASE carried out (`hydra.launcher.policy=spase`): trials of members on 1, 2, ... devices, then the solver's plan.

A candidate (parallelism) is a list of overrides of the member's configuration. {devices} stands for their number,
{share} for the member's own value divided by it: so a batch is as large over all devices as it is on one."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from rich.table import Table as Rows

from lightning_decentral.shared.compute import cuda
from lightning_decentral.shared.errors import one_line
from lightning_decentral.shared.plan.timeline import Span, later
from lightning_decentral.sweep import progress
from lightning_decentral.sweep.launcher import Carrier, Devices, Ended, slots
from lightning_decentral.sweep.member import MemberFailed, SweepMember, returned, write_record
from lightning_decentral.sweep.plan.allocation import Allocated, Trials
from lightning_decentral.sweep.plan.jobs_file import read_tables
from lightning_decentral.sweep.plan.policy import Scoreboard
from lightning_decentral.sweep.plan.spase import Table
from lightning_decentral.sweep.server import Starts, Sweep

WIDE, SHARED = "trainer.devices={devices}", "data.batch_size={share}"
CANDIDATES: Mapping[str, Sequence[str]] = {
    "one_device": (),
    "spilled": ("strategy=spilled",),
    "ddp": ("strategy=ddp", WIDE, SHARED),
    "compressed": ("strategy=compressed", WIDE, SHARED),
    "token_pipeline": ("strategy=token_pipeline", WIDE),
}
USUAL = ("one_device", "ddp", "token_pipeline")  # exact ones, the fastest where they fit
UNLOGGED = {"WANDB_MODE": "disabled"}


@dataclass(frozen=True)
class Case:
    """A member under one of the candidates, on so many devices."""

    member: SweepMember
    candidate: str
    overrides: Sequence[str]
    devices: int

    def __str__(self) -> str:
        return f"{self.member.name}/{self.candidate}-{self.devices}"

    def composed(self, folder: Path, name: str) -> SweepMember:
        """Compose a member of this name from the configuration and the candidate's overrides. ValueError: Hydra can't,
        or a value can't be shared."""
        there = self.member.config.hydra
        try:
            overrides = [*self.member.overrides, *map(self._filled, self.overrides)]
            config = GlobalHydra.instance().config_loader().load_sweep_config(self.member.config, overrides)
        except (HydraException, OmegaConfBaseException) as error:
            raise ValueError(one_line(error)) from None
        with open_dict(config):
            config.hydra.mode, config.hydra.job.id, config.hydra.job.num = there.mode, there.job.id, there.job.num
            config.hydra.overrides = there.overrides  # a record is known by the member's own
            config.hydra.sweep.dir, config.hydra.sweep.subdir = str(folder.parent), folder.name
        return SweepMember(name, self.member.own_overrides, config, folder, self.devices)

    def _filled(self, override: str) -> str:
        key = override.partition("=")[0]
        value = OmegaConf.select(self.member.config, key) if "{share}" in override else 0
        if not isinstance(value, int) or value % self.devices:
            raise ValueError(f"{key}={value} can't be divided among {self.devices} devices")
        return override.replace("{devices}", str(self.devices)).replace("{share}", str(value // self.devices))


class _Trying(progress.LiveTable):
    """Watcher of trials: keeps and prints their predicted seconds, or why a case is left out."""

    def __init__(self, cases: Mapping[str, Case], arbiter: Trials) -> None:
        super().__init__()
        self._cases, self._arbiter = cases, arbiter
        self.best: dict[str, dict[int, tuple[float, str]]] = {}  # {member: {devices: (seconds, candidate)}}
        self.reasons: dict[str, list[str]] = {}

    def ended(self, member: SweepMember, outcome: JobReturn) -> None:
        case = self._cases[member.name]
        try:
            seconds = self._arbiter.seconds(member.name, outcome.status is JobStatus.COMPLETED)
        except ValueError as error:
            why = one_line(MemberFailed.of(outcome._return_value))
            self.leave_out(case, f"{why} ({error}); its log: {member.log}")
            return
        rows = self.best.setdefault(case.member.name, {})
        rows[case.devices] = min(rows.get(case.devices, (math.inf, "")), (seconds, case.candidate))
        self.say(f"\t{case} : {seconds:.4g} s")

    def leave_out(self, case: Case, why: str) -> None:
        self.reasons.setdefault(case.member.name, []).append(f"{case.candidate} on {case.devices}: {why}")
        self.say(f"\t{case} : left out, {why}")


class SpaseCarrier(Carrier):
    """Carries members out as SPASE plans it: each has its devices to itself, from its start to its end.

    Args:
        candidates: names of `CANDIDATES`, or {name: overrides}; one without {devices} is for one device. None: `USUAL`.
        table: jobs file with members' tables, by their numbers; the others are tried.
        trial_steps: measured steps of a trial, after the first ones.
        trial_limit_seconds: how long a trial may take.
        interval_seconds: how often the plan is made anew, for members that haven't started.

    Raises:
        ValueError: an impossible value.
    """

    def __init__(
        self,
        devices: Devices,
        memory_bytes: int | None,
        policy: object,
        quantum_seconds: float,
        *,
        candidates: Sequence[str] | Mapping[str, Sequence[str]] | None = None,
        table: str | Path | None = None,
        trial_steps: int = 10,
        trial_limit_seconds: float = 300.0,
        interval_seconds: float = 60.0,
    ) -> None:
        if memory_bytes is not None:
            raise ValueError("hydra.launcher.memory_bytes: leave it out, under spase a member has devices to itself")
        if trial_steps < 1 or not min(trial_limit_seconds, interval_seconds, quantum_seconds) > 0:
            raise ValueError("trial_steps, trial_limit_seconds, interval_seconds, quantum_seconds must be above 0")
        names = USUAL if candidates is None else candidates
        given = candidates if isinstance(candidates, Mapping) else {name: CANDIDATES.get(name, "") for name in names}
        if wrong := [name for name, words in given.items() if isinstance(words, str)] or ["none"] * (not given):
            known = ", ".join(CANDIDATES)
            raise ValueError(f"policy.candidates: use some of {known}, or {{name: [overrides]}}, got {wrong[0]}")
        self.devices, self.title = slots(devices, cuda.device_count()), "by SPASE's plan"
        self._candidates = {name: tuple(words) for name, words in given.items()}
        self._known = {} if table is None else {one.name: one for one in read_tables(table, trained=True)}
        self._trial_steps, self._limit_seconds = trial_steps, trial_limit_seconds
        self._interval_seconds, self._quantum_seconds = interval_seconds, quantum_seconds

    def refuse(self, members: Sequence[SweepMember]) -> None:
        used = {name for table in self._known.values() for name in table.parallelism.values()}
        if unknown := used - self._candidates.keys():
            raise ValueError(f"policy.table: {', '.join(sorted(unknown))} is none of policy.candidates")
        if wide := [member for member in members if member.width > 1]:
            asked = f"member {wide[0].name} asks for trainer.devices={wide[0].width}"
            raise ValueError(f"{asked}, which spase chooses: leave it out")

    def run(self, members: Sequence[SweepMember], starts: Starts, alive_per_device: int, scores: Scoreboard) -> Ended:
        tables, outcomes = self._tables(members, starts)
        if not tables:
            return outcomes, {}
        left = [member for member in members if member.name in tables]
        variants = {
            (member.name, k): Case(member, way, self._candidates[way], k).composed(member.folder, member.name)
            for member in left
            for k, way in tables[member.name].parallelism.items()
        }
        quantum, interval = self._quantum_seconds, self._interval_seconds
        arbiter = Allocated(list(tables.values()), self.devices, interval_seconds=interval, quantum_seconds=quantum)

        def start(member: SweepMember, *others: Any) -> Any:
            return starts(variants[member.name, len(arbiter.started[member.name].devices)], *others)

        with progress.LiveTable() as watcher:
            sweep = Sweep(left, arbiter, start, watcher, len(self.devices), scores)
            outcomes |= sweep.run()
        first = arbiter.plan.spans().items()
        planned = {f"{name}/{g}": Span(self.devices[g], span.start, span.finish) for (name, g), span in first}
        self.planned, self.shown = later(planned, sweep.began), happened(arbiter, tables)
        return outcomes, later(arbiter.spans(), sweep.began)

    def _tables(self, members: Sequence[SweepMember], starts: Starts) -> tuple[dict[str, Table], dict[str, JobReturn]]:
        """Try members without a known table; return members' tables, and outcomes of those that no candidate runs."""
        folder = Path(str(members[0].config.hydra.sweep.dir)).absolute()
        cases = [case for member in members if member.name not in self._known for case in self._cases(member)]
        found = self._tried({str(case): case for case in cases}, folder / "trials", starts)
        tables, outcomes = dict[str, Table](), dict[str, JobReturn]()
        for name, member in ((member.name, member) for member in members):
            if name in self._known:
                tables[name] = self._known[name]
            elif rows := found.best.get(name):
                tables[name] = Table(
                    name, {k: s for k, (s, _) in rows.items()}, {k: way for k, (_, way) in rows.items()}
                )
            else:
                why = "; ".join(found.reasons.get(name, ["none is for so few devices"]))
                error = MemberFailed("ValueError", f"no candidate runs it: {why}")
                outcomes[name] = returned(member, JobStatus.FAILED, error)
                write_record(member, outcomes[name])
        OmegaConf.save({"jobs": [asdict(table) for table in tables.values()]}, folder / "tables.yaml")
        return tables, outcomes

    def _cases(self, member: SweepMember) -> Iterator[Case]:
        """A member's candidates on 1, 2, 4, ... and all devices."""
        count = len(self.devices)
        numbers = [k for k in range(1, count + 1) if k == count or k & (k - 1) == 0]
        for name, overrides in self._candidates.items():
            wide = any("{devices}" in override for override in overrides)
            yield from (Case(member, name, overrides, k) for k in numbers if (k > 1) == wide)

    def _tried(self, cases: Mapping[str, Case], folder: Path, starts: Starts) -> _Trying:
        widths = {name: case.devices for name, case in cases.items()}
        arbiter = Trials(widths, self.devices, self._trial_steps, self._limit_seconds)
        start: Starts = lambda trial, environment, line: starts(trial, {**environment, **UNLOGGED}, line)  # noqa: E731
        watcher, trials = _Trying(cases, arbiter), list[SweepMember]()
        with watcher:
            for name, case in cases.items():
                try:
                    trials.append(case.composed(folder / name, name))
                except ValueError as error:
                    watcher.leave_out(case, str(error))
            trials.sort(key=lambda trial: -trial.width)  # those that need all devices first: the others fill up
            Sweep(trials, arbiter, start, watcher, len(self.devices)).run()
        return watcher


def happened(arbiter: Allocated, tables: Mapping[str, Table]) -> Rows:
    """Table of each member's devices and times: as first planned, and as they were."""
    spans = {name: account.spans[0] for name, account in arbiter.ended.items()}
    planned, real = arbiter.plan.makespan_seconds, max(span.finish for span in spans.values())
    title = f"{planned:.4g} s planned, {real:.4g} s in fact; the plan changed {arbiter.changes} times"
    rows = Rows("member", "planned", "from, to s", "in fact", "from, to s", "off", title=title, title_justify="left")
    for job in arbiter.plan.in_order():
        way, end, span = tables[job.name].parallelism, job.start + job.seconds, spans[job.name]
        home = arbiter.ended[job.name].home
        there = [arbiter.devices[g] for g in job.devices]
        cells = [f"{way[len(names)]} on {', '.join(names)}" for names in (there, home)]
        times = [f"{start:.1f}, {finish:.1f}" for start, finish in ((job.start, end), (span.start, span.finish))]
        off = f"{100 * (span.finish / end - 1):+.0f} %"
        rows.add_row(job.name, cells[0], times[0], cells[1], times[1], off)
    return rows
