"""Public traces of jobs (Tiresias, Gavel) as queues: arrivals, and requested devices and iterations.

    seconds of a piece = devices * iterations in it * step seconds of the model's profile * variation

A trace has no seconds of single iterations that would hold elsewhere; they are synthesised from measured profiles, with
the profile's own variation between steps. A job that asked for several devices becomes that many times the work on one
device at a time; or for JigSaw a gang; or under SPASE it is divided evenly among up to as many as it asked for.

Layouts: Tiresias (github.com/SymbioticLab/Tiresias, simulator/60_job.csv: comma-separated, with a header), Gavel
(github.com/stanford-futuredata/gavel, scheduler/traces: tab-separated, without one)."""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from random import Random

from lightning_decentral.shared.plan.arguments import text_of
from lightning_decentral.shared.plan.profile import Profile
from lightning_decentral.sweep.plan.dispatch import Queue, WorkPiece
from lightning_decentral.sweep.plan.gangs import Gang, staircase
from lightning_decentral.sweep.plan.spase import Table

PIECES = 20
DRAWS = 100  # steps whose mean variation stands for that of a piece


@dataclass(frozen=True)
class Submitted:
    """Job of a trace, one line."""

    name: str
    model: str
    devices: int
    arrival_seconds: float
    iterations: int


Layout = Callable[[str], Iterator[tuple[int, Mapping[str, str]]]]
"""Parser of a trace's text: (line number, its fields by the names of `Submitted`) for each job; ValueError for a line
with wrong columns, or a header without the needed ones."""

TIRESIAS = {
    "name": "job_id",
    "model": "model_name",
    "devices": "num_gpu",
    "arrival_seconds": "submit_time",
    "iterations": "iterations",
}
GAVEL_WIDTHS = (9, 10)  # fields of a line


def tiresias(text: str) -> Iterator[tuple[int, Mapping[str, str]]]:
    """Parse Tiresias's columns: job_id,num_gpu,submit_time,iterations,model_name,duration,interval."""
    reader = csv.reader(text.splitlines())
    header = [name.strip() for name in next(reader, [])]
    missing = [name for name in TIRESIAS.values() if name not in header]
    if missing:
        raise ValueError(f"line 1: the header has no {missing[0]}: it must name {', '.join(TIRESIAS.values())}")
    for row in filter(None, reader):
        if len(row) != len(header):
            raise ValueError(f"line {reader.line_num}: {len(row)} fields, the header has {len(header)}")
        yield reader.line_num, {ours: row[header.index(theirs)].strip() for ours, theirs in TIRESIAS.items()}


def gavel(text: str) -> Iterator[tuple[int, Mapping[str, str]]]:
    """Parse Gavel's columns: type, command, (directory,) option for steps, needs data, steps, scale factor, weight,
    objective, arrival.

    Jobs are named after their line."""
    for number, line in enumerate(text.splitlines(), start=1):
        fields = line.split("\t")
        if not line.strip():
            continue
        if len(fields) not in GAVEL_WIDTHS:
            raise ValueError(f"line {number}: {len(fields)} fields between tabs, but 9 or 10 are needed")
        # From the end, as older files lack the directory.
        model, steps, devices, arrival = fields[0], fields[-5], fields[-4], fields[-1]
        named = {"name": str(number), "model": model.strip(), "devices": devices}
        yield number, {**named, "arrival_seconds": arrival, "iterations": steps}


LAYOUTS: Mapping[str, Layout] = {"tiresias": tiresias, "gavel": gavel}


def read_trace(path: str | Path, layout: Layout) -> list[Submitted]:
    """Read the jobs of a trace from a file, in order; ValueError: unreadable, no jobs, or malformed (with the line's
    number)."""
    text = text_of(path, "give a trace")
    try:
        found = [_submitted(number, fields) for number, fields in layout(text)]
        if not found:
            raise ValueError("the trace has no jobs: give a trace with at least one line")
    except ValueError as error:
        raise ValueError(f"{path}, {error}") from None
    return found


def _submitted(number: int, fields: Mapping[str, str]) -> Submitted:
    counts = {}
    for name in ("devices", "iterations"):
        counts[name] = int(fields[name]) if fields[name].strip().isdecimal() else 0
        if counts[name] < 1:
            raise ValueError(f"line {number}: {name} must be a whole number of 1 or more, got {fields[name]!r}")
    try:
        arrival = float(fields["arrival_seconds"])
    except ValueError:
        arrival = -1.0
    if not (isfinite(arrival) and arrival >= 0):
        raise ValueError(f"line {number}: arrival must be 0 or more seconds, got {fields['arrival_seconds']!r}")
    return Submitted(fields["name"], fields["model"], arrival_seconds=arrival, **counts)


def profile_of(job: Submitted, profiles: Mapping[str, Profile]) -> Profile:
    """Return the profile of the job's model; ValueError: there is none."""
    profile = profiles.get(job.model) or profiles.get("")
    if profile is None:
        remedy = f"give --profile '{job.model}=FILE', or --profile FILE for all models"
        raise ValueError(f"no profile for {job.model!r}: {remedy}")
    return profile


def gangs(jobs: Sequence[Submitted], profiles: Mapping[str, Profile], size: int) -> list[tuple[Gang, float]]:
    """Return each job as a gang on `size` devices, with its arrival: a staircase's workers, elsewhere pieces of 0 s.
    ValueError: a job of more workers than devices, or a model without a profile."""
    found = []
    for job in jobs:
        if job.devices > size:
            raise ValueError(f"job {job.name} asked for {job.devices} devices: give --devices {job.devices} or more")
        blocks = profile_of(job, profiles).model.step_blocks
        forward = sum(block.forward_seconds for block in blocks)
        backward = sum(block.backward_seconds + block.update_seconds for block in blocks)
        own = staircase(f"{job.name} {job.model}", forward, backward, job.devices, job.iterations)
        found.append((replace(own, seconds=own.seconds + (0.0,) * (size - job.devices)), job.arrival_seconds))
    return found


def queues(
    jobs: Sequence[Submitted], profiles: Mapping[str, Profile], pieces: int = PIECES, seed: int = 0
) -> list[Queue]:
    """Cut each job into `pieces` pieces, as equal in iterations as possible. Profiles are keyed by the trace's names of
    models; the key "" serves all others. ValueError: a model without a profile."""
    if pieces < 1:
        raise ValueError(f"pieces must be at least 1, got {pieces}")
    random, found = Random(seed), []
    for job in jobs:
        profile = profile_of(job, profiles)
        step, count = job.devices * profile.model.seconds, min(pieces, job.iterations)
        made = []
        for i in range(count):
            part = job.iterations * (i + 1) // count - job.iterations * i // count
            draws = random.choices(profile.variation, k=min(part, DRAWS)) if profile.variation else [1.0]
            made.append(WorkPiece(step * part * (sum(draws) / len(draws))))
        found.append(Queue(f"{job.name} {job.model}", tuple(made), job.arrival_seconds))
    return found


def tables(jobs: Sequence[Submitted], profiles: Mapping[str, Profile], seed: int = 0) -> list[Table]:
    """Make each job's table for SPASE, with linear scaling up to the number of devices that it asked for:

        t_k = devices * iterations * step seconds * variation / k        k = 1, 2, 4, ... and the asked number

    ValueError: as `queues`."""
    found = []
    for job, queue in zip(jobs, queues(jobs, profiles, 1, seed), strict=True):
        numbers = sorted({2**i for i in range(job.devices.bit_length())} | {job.devices})
        found.append(Table(queue.name, {k: queue.pieces[0].compute_seconds / k for k in numbers}))
    return found
