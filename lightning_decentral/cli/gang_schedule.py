"""Part of `lightning-decentral schedule`: the policies jigsaw and spase, for jobs of several devices at once.

JigSaw pairs the shallow worker of one job with the deep worker of another on a device (gangs). SPASE chooses how many
devices each job gets, which, and when. Both are compared with a lower bound and, for small sets, an exact program."""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from lightning_decentral.cli.console import answer, numbers_table, say
from lightning_decentral.shared.plan.profile import Profile, read
from lightning_decentral.shared.plan.timeline import Span, chrome_trace, write_chrome_trace
from lightning_decentral.sweep import gantt
from lightning_decentral.sweep.plan import gangs as jig
from lightning_decentral.sweep.plan import spase as allocation
from lightning_decentral.sweep.plan.jobs_file import are_trainings, read_gangs, read_jobs, read_tables
from lightning_decentral.sweep.plan.simulation import finish_seconds
from lightning_decentral.sweep.plan.traces import LAYOUTS, Submitted, read_trace
from lightning_decentral.sweep.plan.traces import gangs as gangs_of
from lightning_decentral.sweep.plan.traces import tables as tables_of
from lightning_decentral.sweep.trainings import AllocatedTrainings, GangTrainings

Choice = TypeVar("Choice")

SHOWN_JOBS = 30
AIM = 0.1  # of the simulated makespan
SYNTHESISED = "seconds per iteration are synthesised from the profiles: the trace has arrivals and iterations only"
EVENLY = "a job's work is divided evenly among up to as many devices as it asked for, and arrivals aren't counted"
EXACT_SECONDS = 10.0  # for the solver
MOST_BINARIES = 500  # variables of a program that it mostly solves in that time
MOST_PIECES = 1_000_000


Drawn = list[tuple[str, str, Span]]  # (job, name in a trace viewer, device and time)
Planned = tuple[tuple[Table, ...], tuple[str, ...], dict[str, Drawn]]
"""(tables, remarks, the best plan and what happened, by title)."""


@dataclass(frozen=True)
class GangTurn:
    """JSON row: a job that a device runs, with start and end."""

    job: str
    device: str
    start_seconds: float
    finish_seconds: float


@dataclass(frozen=True)
class Gangs:
    """JSON answer of jigsaw and spase: the turns of the best plan."""

    policy: str
    turns: list[GangTurn]
    remarks: list[str]


def run(options: argparse.Namespace) -> None:
    # What goes with jobs of one device only.
    if options.policy not in PLANS:
        raise ValueError(
            f"--policy {options.policy}: {' and '.join(PLANS)} are for jobs of several devices at once, in files of "
            "their own: name one policy"
        )
    if options.memory_bytes:
        raise ValueError(f"--memory-bytes is for jobs of one device at a time: leave it out with {options.policy}")
    if (options.jobs is None) == (options.trace is None):
        raise ValueError(f"give a file of jobs: lightning-decentral schedule jobs.yaml --policy {options.policy}")
    tables, remarks, found = PLANS[options.policy](options)
    panels = {title: [gantt.Bar(job, span) for job, _, span in drawn] for title, drawn in found.items()}
    traces = (chrome_trace({name: span for _, name, span in drawn}, title) for title, drawn in found.items())
    lines = [*remarks, *written(options, panels, [event for events in traces for event in events])]
    turns = [GangTurn(job, span.worker, span.start, span.finish) for job, _, span in next(iter(found.values()))]
    answer(options, Gangs(options.policy, turns, lines), *tables, *lines)


def jigsaw(options: argparse.Namespace) -> Planned:
    """Every pairing of the file's gangs, or of its trainings, which are measured first; the best one's iterations, and
    with `--run` what the trainings did. ValueError: not a piece for each device, or too many pieces to go through."""
    if options.trace is not None:
        return jigsaw_of_trace(options)
    if not are_trainings(options.jobs):
        if options.rehearse:
            raise ValueError(
                "--run: the jobs have pieces, no trainings behind them: give overrides, or leave out --run"
            )
        return jigsaw_plan(options, read_gangs(options.jobs))[1]
    outputs = Path("outputs") / f"schedule-{datetime.now():%Y%m%d-%H%M%S}"
    jobs = read_jobs(options.jobs).trainings
    if late := [job.name for job in jobs if job.arrival_seconds]:
        raise ValueError(f"job {late[0]} has arrival_seconds, but under jigsaw all jobs begin together: leave them out")
    trainings = GangTrainings(jobs, options.devices or 2, outputs, options.application, options.measured)
    for line in trainings.announced:
        say(Console(highlight=False, stderr=True), line)
    turns, (tables, remarks, found) = jigsaw_plan(options, trainings.gangs())
    if options.rehearse:
        ran = trainings.carry_out(turns)
        real = [(piece.job, f"{piece}, {span.worker}", span) for piece, span in ran.items()]
        ends = turns.completion_seconds(), finish_seconds(ran)
        tables = *tables, ends_table(*ends)
        remarks = *remarks, verdict(max(ends[0].values()), max(ends[1].values()), trainings.measure)
        found = {"jigsaw, planned": found["jigsaw"], "jigsaw, real": real}
    return tables, remarks, found


def jigsaw_plan(options: argparse.Namespace, gangs: Sequence[jig.Gang]) -> tuple[jig.Turns, Planned]:
    """Compare the pairings of gangs; return the best one's turns with what is shown of them."""
    size = len(gangs[0].seconds)
    if options.devices not in (None, size):
        raise ValueError(
            f"--devices {options.devices}: job {gangs[0].name} has {size} pieces, one for each device: "
            f"give --devices {size}, or other pieces"
        )
    pieces = size * sum(gang.iterations for gang in gangs)
    if pieces > MOST_PIECES:
        raise ValueError(f"{pieces} pieces are too many to go through, at most {MOST_PIECES}: give fewer iterations")
    found = {name: pairing.turns(gangs) for name, pairing in jig.PAIRINGS.items()}
    remark = why_not_exact(len(gangs) * size**2)
    if not remark:
        found["exact"] = jig.ExactGangs(EXACT_SECONDS).turns(gangs)
    best = min(found, key=lambda name: found[name].cycle_seconds)
    turns = jig.ordered(found[best])
    bound = jig.lower_bound_seconds(gangs)
    cycles = {name: pairing.cycle_seconds for name, pairing in found.items()}
    cycles["one job after the other"] = turns.unaware_seconds
    title = f"{len(gangs)} jobs, {size} devices: no cycle is under {bound:.4g} s"
    tables = compared(title, ("pairing", "cycle s"), cycles, bound), turns_table(best, turns)
    drawn = [(job, f"{job} {k}, {span.worker}", span) for (job, k, _), span in turns.spans().items()]
    return turns, (tables, (*remark, jig.sentence(turns)), {"jigsaw": drawn})


def jigsaw_of_trace(options: argparse.Namespace) -> Planned:
    """Completion times of a trace's jobs, in JigSaw's cycles and with workers by rank."""
    if options.rehearse:
        raise ValueError("--run: a trace has no trainings behind its jobs: give a file of jobs, or leave out --run")
    jobs = gangs_of(*trace_of(options), 1 if options.devices is None else options.devices)
    ways: dict[str, Sequence[jig.Pairing]] = {"jigsaw": [*jig.PAIRINGS.values()], "rank r on device r": [jig.Unaware()]}
    found = {name: jig.stays(jobs, own) for name, own in ways.items()}
    table = Table("places", "makespan s", "mean completion s", title=f"{len(jobs)} jobs", title_justify="left")
    for name, stays in found.items():
        makespan = max(span.finish for span in stays.values()) - min(span.start for span in stays.values())
        mean = sum(span.finish - span.start for span in stays.values()) / len(stays)
        table.add_row(name, f"{makespan:.4g}", f"{mean:.4g}")
    return (table,), (SYNTHESISED,), {"jigsaw": [(job, job, span) for job, span in found["jigsaw"].items()]}


def turns_table(name: str, turns: jig.Turns) -> Table:
    """Table of jobs in the order in which devices run them."""
    headings = "job", *(f"device {g}" for g in range(turns.devices)), "iterations", "end s"
    table = numbers_table(*headings, title=f"{name}: seconds of the pieces, in order of turns")
    ends = turns.completion_seconds()
    for j in turns.order:
        gang = turns.gangs[j]
        seconds = (f"{turns.seconds(j, g):.4g}" for g in range(turns.devices))
        table.add_row(gang.name, *seconds, str(gang.iterations), f"{ends[gang.name]:.4g}")
    return table


def spase(options: argparse.Namespace) -> Planned:
    """Compare the allocations of the file's tables, or of a trace's; show the best one's devices and starts. With
    `--run` the file's trainings are carried out, tried first where they have no table."""
    devices = 1 if options.devices is None else options.devices
    if devices < 1:
        raise ValueError(f"devices must be at least 1, got {devices}: give --devices 1 or more")
    if options.rehearse:
        return spase_run(options, devices)
    if options.trace is None:
        return spase_plan(read_tables(options.jobs), devices)
    rows, remarks, found = spase_plan(tables_of(*trace_of(options), options.seed), devices)
    return rows, (*remarks, SYNTHESISED, EVENLY), found


def spase_run(options: argparse.Namespace, devices: int) -> Planned:
    """Carry the file's trainings out; what was planned beside what happened. ValueError: a job without overrides."""
    jobs = read_jobs(options.jobs) if options.jobs is not None and are_trainings(options.jobs) else None
    if jobs is None or jobs.queues:
        raise ValueError("--run: jobs need trainings behind them: give each its overrides, or leave out --run")
    outputs = Path("outputs") / f"schedule-{datetime.now():%Y%m%d-%H%M%S}"
    trainings = AllocatedTrainings(jobs.trainings, devices, outputs, options.application, options.measured)
    table, *spans = trainings.carry_out(options.jobs)
    planned, real = (max(span.finish for span in one.values()) for one in spans)
    titled = zip(("spase, planned", "spase, real"), spans, strict=True)
    drawn = {title: [(name.rpartition("/")[0], name, at) for name, at in one.items()] for title, one in titled}
    return (table,), (verdict(planned, real, trainings.measure),), drawn


def spase_plan(tables: Sequence[allocation.Table], devices: int) -> Planned:
    found = {"greedy": allocation.GreedySpase().plan(tables, devices)}
    remark = why_not_exact(len(tables) * (devices + len(tables) // 2))
    if not remark:
        found["exact"] = allocation.ExactSpase(EXACT_SECONDS).plan(tables, devices)
    best = min(found, key=lambda name: found[name].makespan_seconds)
    bound = allocation.lower_bound_seconds([table.within(devices) for table in tables], devices)
    title = f"{len(tables)} jobs, {devices} device{'s' * (devices > 1)}: no makespan is under {bound:.4g} s"
    spans = {name: plan.makespan_seconds for name, plan in found.items()}
    gaps = {name: f"{100 * plan.gap:.1f} %" for name, plan in found.items()}
    rows = compared(title, ("allocation", "makespan s"), spans, bound, {"at most off the best": gaps})
    granted = Table("job", "devices", "start s", "end s", title=f"{best}: who gets what", title_justify="left")
    for job in sorted(found[best].granted, key=lambda job: (job.start, job.devices)):
        end = job.start + job.seconds
        granted.add_row(job.name, ", ".join(map(str, job.devices)), f"{job.start:.4g}", f"{end:.4g}")
    turns = found[best].spans().items()
    return (rows, granted), remark, {"spase": [(name, f"{name}, {span.worker}", span) for (name, _), span in turns]}


def compared(
    title: str,
    headings: Sequence[str],
    found: Mapping[str, float],
    bound: float,
    more: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
) -> Table:
    """Table of plans, the shortest first, with their ratio to the lower bound."""
    table = numbers_table(*headings, "x bound", *more, title=title)
    for name, seconds in sorted(found.items(), key=lambda item: item[1]):
        ratio = f"{seconds / bound:.3f}" if bound else "1"
        table.add_row(name, f"{seconds:.4g}", ratio, *(column[name] for column in more.values()))
    return table


def chosen(kind: str, name: str, known: Mapping[str, Choice], alone: Iterable[str] = ()) -> Choice:
    """Look up a choice by its name. `alone`: further names for the message. ValueError: an unknown one, with the known
    ones."""
    if name not in known:
        raise ValueError(f"there is no {kind} {name!r}: use one of {', '.join([*known, *alone])}")
    return known[name]


def trace_of(options: argparse.Namespace) -> tuple[list[Submitted], dict[str, Profile]]:
    """Read the trace's jobs, and {model: profile} of MODEL=FILE; "" is that of all other models."""
    lines = read_trace(options.trace, chosen("layout", options.layout, LAYOUTS))[: options.first]
    return lines, {model: read(path) for model, _, path in (one.rpartition("=") for one in options.profile)}


def ends_table(simulated: Mapping[str, float], real: Mapping[str, float]) -> Table:
    """Table of when each job ended, simulated and for real."""
    table = Table("job", "simulated end s", "real end s", "off")
    for name in list(simulated)[:SHOWN_JOBS]:
        a, b = simulated[name], real[name]
        table.add_row(name, f"{a:.4g}", f"{b:.4g}", f"{100 * off(a, b):+.1f} %")
    return table


def off(simulated: float, real: float) -> float:
    """Relative error of a simulation: (real - simulated) / simulated."""
    return (real - simulated) / simulated if simulated else 0.0


def verdict(simulated: float, real: float, counted: str) -> str:
    held = "within" if abs(off(simulated, real)) <= AIM else "NOT within"
    return (
        f"makespan {simulated:.4g} s simulated, {real:.4g} s for real "
        f"({100 * off(simulated, real):+.1f} %, {held} {100 * AIM:.0f} %): {counted}"
    )


def why_not_exact(binaries: int) -> tuple[str, ...]:
    """Sentence on why there is no exact plan; none if the program is solved."""
    if not find_spec("scipy"):
        return ("no exact plan: it needs scipy: pip install 'lightning-decentral[schedule]'",)
    if binaries > MOST_BINARIES:
        return (f"no exact plan: {binaries} choices are more than the {MOST_BINARIES} that a solver goes through",)
    return ()


def written(
    options: argparse.Namespace, panels: Mapping[str, Sequence[gantt.Bar]], events: Sequence[Mapping[str, object]]
) -> list[str]:
    """Write the requested files, the Gantt chart and the trace."""
    lines = []
    if options.plot:
        gantt.draw(panels, options.plot)
        lines.append(f"picture: {options.plot}")
    if options.chrome:
        try:
            write_chrome_trace(events, options.chrome)
        except OSError as error:
            raise ValueError(f"--chrome {options.chrome} can't be written: {error.strerror}") from None
        lines.append(f"trace: {options.chrome}")
    return lines


PLANS: dict[str, Callable[[argparse.Namespace], Planned]] = {"jigsaw": jigsaw, "spase": spase}
