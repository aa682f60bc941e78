"""`lightning-decentral schedule jobs.yaml --policy lrtf --devices 2`: how long many jobs take on few devices."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lightning_decentral.cli import gang_schedule
from lightning_decentral.cli.console import answer, refuse_below, say, whole
from lightning_decentral.cli.gang_schedule import chosen
from lightning_decentral.cli.quantities import SIZE
from lightning_decentral.shared.plan.timeline import chrome_trace
from lightning_decentral.sweep import gantt
from lightning_decentral.sweep.plan.dispatch import Processor, Queue
from lightning_decentral.sweep.plan.dispatch import devices as equal_devices
from lightning_decentral.sweep.plan.jobs_file import Jobs, read_jobs
from lightning_decentral.sweep.plan.policy import POLICIES
from lightning_decentral.sweep.plan.simulation import (
    Spans,
    busy_fraction,
    finish_seconds,
    lower_bound_seconds,
    makespan_seconds,
    mean_completion_seconds,
    simulate,
)
from lightning_decentral.sweep.plan.traces import LAYOUTS, PIECES, queues
from lightning_decentral.sweep.trainings import MEASURED, Trainings


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("jobs", nargs="?", help="YAML file of jobs: pieces in seconds, profiles, trainings")
    parser.add_argument(
        "--policy",
        default="lrtf",
        help=f"one or more of {','.join(POLICIES)}, of which the first is drawn and run; "
        f"or one of {','.join(gang_schedule.PLANS)}, for jobs of several devices at once",
    )
    parser.add_argument("--devices", type=whole, help="equal devices (default: 1; jigsaw: pieces of a job, or 2)")
    parser.add_argument("--memory-bytes", type=SIZE, help="memory of each device; larger jobs are refused: 24GB")
    parser.add_argument("--plot", type=Path, help="Gantt chart to write: schedule.png")
    parser.add_argument("--chrome", type=Path, help="trace to write for Perfetto or chrome://tracing: schedule.json")
    parser.add_argument("--trace", type=Path, help="public trace of jobs in place of the YAML file")
    parser.add_argument(
        "--layout", default="tiresias", help=f"of the trace: {', '.join(LAYOUTS)} (default: %(default)s)"
    )
    parser.add_argument("--profile", action="append", default=[], help="MODEL=FILE or FILE for all models of the trace")
    parser.add_argument(
        "--pieces", type=whole, default=PIECES, help="pieces of each job of the trace (default: %(default)s)"
    )
    parser.add_argument("--first", type=whole, help="use only the first n jobs of the trace")
    parser.add_argument("--seed", type=whole, default=0, help="seed of the variation of the trace's steps")
    parser.add_argument("--run", action="store_true", dest="rehearse", help="also train the jobs for real")
    parser.add_argument(
        "--measured",
        type=whole,
        default=MEASURED,
        help="steps of each training without a profile, or of each trial under spase (default: %(default)s)",
    )
    parser.set_defaults(run=run, outputs=("plot", "chrome"))


def run(options: argparse.Namespace) -> None:
    names = options.policy.split(",")
    if set(names) & set(gang_schedule.PLANS):
        gang_schedule.run(options)
        return
    refuse_below(1, {"--pieces": options.pieces, "--first": options.first})
    chosen("layout", options.layout, LAYOUTS)
    policies = {name: chosen("policy", name, POLICIES, gang_schedule.PLANS) for name in names}
    limit = float("inf") if options.memory_bytes is None else options.memory_bytes
    there = equal_devices(1 if options.devices is None else options.devices, limit)
    asked, remarks = jobs_of(options)
    if options.rehearse and asked.queues:
        raise ValueError(
            f"--run: job {asked.queues[0].name} has pieces and no training behind them: give it overrides, "
            "or leave out --run"
        )
    if options.rehearse and asked.trainings and limit < float("inf"):
        raise ValueError("--run keeps all trainings in memory at once: leave out --memory-bytes, or --run")
    console = Console(highlight=False, stderr=options.json)
    outputs = Path("outputs") / f"schedule-{datetime.now():%Y%m%d-%H%M%S}"
    trainings = Trainings(asked.trainings, len(there), outputs, options.application, options.measured)
    for line in trainings.announced:
        console.print(line, soft_wrap=True, markup=False)
    jobs = [*asked.queues, *trainings.queues()]
    schedules = {name: simulate(jobs, there, policy) for name, policy in policies.items()}
    found = {"simulated": schedules[names[0]]}
    rows = {
        name: MemberOutcome(
            makespan_seconds(jobs, spans), mean_completion_seconds(jobs, spans), busy_fraction(jobs, spans, there)
        )
        for name, spans in schedules.items()
    }
    tables = policies_table(jobs, there, rows), jobs_table(jobs, found["simulated"])
    for part in [] if options.json else tables:
        say(console, part)
    if options.rehearse:
        console.print(f"running for about {makespan_seconds(jobs, found['simulated']):.3g} s ...")
        found["real"] = trainings.rehearse(jobs, there, policies[names[0]])
        say(console, gang_schedule.ends_table(*map(finish_seconds, found.values())))
        simulated, real = (makespan_seconds(jobs, spans) for spans in found.values())
        remarks = [*remarks, gang_schedule.verdict(simulated, real, trainings.measure)]
    ends = {title: finish_seconds(spans) for title, spans in found.items()}
    bars = {title: [gantt.Bar(ran.job, at, ran.load) for ran, at in spans.items()] for title, spans in found.items()}
    panels = {f"{names[0]}, {title}": drawn for title, drawn in bars.items()}
    events = [event for title, spans in found.items() for event in chrome_trace(spans, title)]
    lines = [*remarks, *gang_schedule.written(options, panels, events)]
    answer(options, ScheduleAnswer(lower_bound_seconds(jobs, there), rows, ends, lines), *lines)


@dataclass(frozen=True)
class MemberOutcome:
    """JSON row: simulated outcome of one policy."""

    makespan_seconds: float
    mean_completion_seconds: float
    devices_busy: float


@dataclass(frozen=True)
class ScheduleAnswer:
    """JSON answer of `schedule`: outcomes by policy; end of each job under the first, simulated and (--run) real."""

    bound_seconds: float
    policies: dict[str, MemberOutcome]
    end_seconds: dict[str, dict[str, float]]
    remarks: list[str]


def jobs_of(options: argparse.Namespace) -> tuple[Jobs, list[str]]:
    """Read the jobs of the file or the trace, with remarks."""
    if (options.jobs is None) == (options.trace is None):
        raise ValueError("give either a file of jobs or --trace: lightning-decentral schedule jobs.yaml --policy lrtf")
    if options.trace is None:
        return read_jobs(options.jobs), []
    lines, profiles = gang_schedule.trace_of(options)
    several = sum(line.devices > 1 for line in lines)
    remarks = [gang_schedule.SYNTHESISED]
    if several:
        work = f"{several} of {len(lines)} jobs asked for several devices: they count as so many times the work on one"
        remarks.append(work)
    return Jobs(tuple(queues(lines, profiles, options.pieces, options.seed))), remarks


def policies_table(jobs: Sequence[Queue], there: Sequence[Processor], rows: Mapping[str, MemberOutcome]) -> Table:
    bound = lower_bound_seconds(jobs, there)
    title = f"{len(jobs)} jobs, {len(there)} device{'s' * (len(there) > 1)}: no makespan is under {bound:.4g} s"
    makespans = {name: row.makespan_seconds for name, row in rows.items()}
    means = {name: f"{row.mean_completion_seconds:.4g}" for name, row in rows.items()}
    busy = {name: f"{100 * row.devices_busy:.1f} %" for name, row in rows.items()}
    more = {"mean completion s": means, "devices busy": busy}
    return gang_schedule.compared(title, ("policy", "makespan s"), makespans, bound, more)


def jobs_table(jobs: Sequence[Queue], spans: Spans) -> Table:
    """Table of when each job arrived and ended under the first policy."""
    finish = finish_seconds(spans)
    table = Table("job", "pieces", "arrival s", "end s", "completion s")
    for job in jobs[: gang_schedule.SHOWN_JOBS]:
        end, arrival = finish[job.name], job.arrival_seconds
        table.add_row(job.name, str(len(job.pieces)), f"{arrival:.4g}", f"{end:.4g}", f"{end - arrival:.4g}")
    if len(jobs) > gang_schedule.SHOWN_JOBS:
        table.add_row(f"... {len(jobs) - gang_schedule.SHOWN_JOBS} more")
    return table
