"""Part of `lightning-decentral schedule`: the policies jigsaw and spase, for jobs of several devices at once.

JigSaw pairs the shallow worker of one job with the deep worker of another on a device (gangs). SPASE chooses how many
devices each job gets, which, and when. Both are compared with a lower bound and, for small sets, an exact program.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import MappingProxyType

from rich.table import Table

from lightning_decentral.cli.console import answer
from lightning_decentral.shared.plan.timeline import Span, chrome_trace, write_chrome_trace
from lightning_decentral.sweep import gantt
from lightning_decentral.sweep.plan import gangs as jig
from lightning_decentral.sweep.plan import spase as allocation
from lightning_decentral.sweep.plan.jobs_file import read_gangs, read_tables

PAIRINGS: dict[str, jig.Pairing] = {
    "rank r on device r": jig.Unaware(),
    "complementary": jig.ComplementaryPairing(),
    "latin square": jig.LatinSquare(),
    "greedy": jig.GreedyGangs(),
}
EXACT_SECONDS = 10.0  # for the solver
MOST_BINARIES = 500  # variables of a program that it mostly solves in that time
MOST_PIECES = 1_000_000


Planned = tuple[tuple[Table, ...], tuple[str, ...], list[tuple[str, str, Span]]]
"""(tables, remarks, the best plan: job, name in a trace viewer, device and time)."""


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
    given = {"--run": options.rehearse, "--trace": options.trace, "--memory-bytes": options.memory_bytes}
    if wrong := [option for option, value in given.items() if value]:
        raise ValueError(f"{wrong[0]} is for jobs of one device at a time: leave it out with --policy {options.policy}")
    if options.jobs is None:
        raise ValueError(f"give a file of jobs: lightning-decentral schedule jobs.yaml --policy {options.policy}")
    tables, remarks, found = PLANS[options.policy](options)
    bars = [gantt.Bar(job, span) for job, _, span in found]
    events = chrome_trace({name: span for _, name, span in found}, options.policy)
    lines = [*remarks, *written(options, {options.policy: bars}, events)]
    turns = [GangTurn(job, span.worker, span.start, span.finish) for job, _, span in found]
    answer(options, Gangs(options.policy, turns, lines), *tables, *lines)


def jigsaw(options: argparse.Namespace) -> Planned:
    """Every pairing of the file's gangs; the best one's iterations. ValueError: not a piece for each device, or too
    many pieces to go through."""
    gangs = read_gangs(options.jobs)
    size = len(gangs[0].seconds)
    if options.devices not in (None, size):
        raise ValueError(
            f"--devices {options.devices}: job {gangs[0].name} has {size} pieces, one for each device: "
            f"give --devices {size}, or other pieces"
        )
    pieces = size * sum(gang.iterations for gang in gangs)
    if pieces > MOST_PIECES:
        raise ValueError(f"{pieces} pieces are too many to go through, at most {MOST_PIECES}: give fewer iterations")
    found = {name: pairing.turns(gangs) for name, pairing in PAIRINGS.items()}
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
    return tables, remark, [(job, f"{job} {k}, {span.worker}", span) for (job, k, _), span in turns.spans().items()]


def turns_table(name: str, turns: jig.Turns) -> Table:
    """Table of jobs in the order in which devices run them."""
    table = Table(title=f"{name}: seconds of the pieces, in order of turns", title_justify="left")
    for heading in ("job", *(f"device {g}" for g in range(turns.devices)), "iterations", "end s"):
        table.add_column(heading, justify="left" if heading == "job" else "right")
    ends = turns.completion_seconds()
    for j in turns.order:
        gang = turns.gangs[j]
        seconds = (f"{turns.seconds(j, g):.4g}" for g in range(turns.devices))
        table.add_row(gang.name, *seconds, str(gang.iterations), f"{ends[gang.name]:.4g}")
    return table


def spase(options: argparse.Namespace) -> Planned:
    """Compare the allocations of the file's tables; show the best one's devices and starts."""
    tables = read_tables(options.jobs)
    devices = 1 if options.devices is None else options.devices
    if devices < 1:
        raise ValueError(f"devices must be at least 1, got {devices}: give --devices 1 or more")
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
    return (rows, granted), remark, [(name, f"{name}, {span.worker}", span) for (name, _), span in turns]


def compared(
    title: str,
    headings: Sequence[str],
    found: Mapping[str, float],
    bound: float,
    more: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
) -> Table:
    """Table of plans, the shortest first, with their ratio to the lower bound."""
    table = Table(title=title, title_justify="left")
    for heading in (*headings, "x bound", *more):
        table.add_column(heading, justify="left" if heading == headings[0] else "right")
    for name, seconds in sorted(found.items(), key=lambda item: item[1]):
        ratio = f"{seconds / bound:.3f}" if bound else "1"
        table.add_row(name, f"{seconds:.4g}", ratio, *(column[name] for column in more.values()))
    return table


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
