"""Public traces of jobs (Tiresias, Gavel) as queues: who arrived when and asked for how many devices and iterations.

    seconds of a piece = devices * iterations in it * step seconds of the model's profile * variation

A trace holds no seconds of single iterations that would hold elsewhere; these are synthesised from measured profiles,
with the profile's own variation between steps. A job that asked for several devices becomes that many times the work
on one device at a time.

Layouts: Tiresias (github.com/SymbioticLab/Tiresias, simulator/60_job.csv: comma-separated, with a header), Gavel
(github.com/stanford-futuredata/gavel, scheduler/traces: tab-separated, without one).
"""

import csv
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from random import Random

from lightning_decentral.shared.plan.arguments import text_of
from lightning_decentral.shared.plan.profile import Profile
from lightning_decentral.sweep.plan.dispatch import Queue, WorkPiece

PIECES = 20
DRAWS = 100  # steps whose mean variation stands for those of a piece


@dataclass(frozen=True)
class Submitted:
    """A line of a trace."""

    name: str
    model: str
    devices: int
    arrival_seconds: float
    iterations: int


class TraceColumns(ABC):
    """Layout of a trace: which column has what."""

    @abstractmethod
    def lines(self, text: str) -> Iterator[tuple[int, Mapping[str, str]]]:
        """(number of the line, its fields by the names of `Submitted`).

        Raises:
            ValueError: a line with other columns, or a header without the needed ones.
        """

    def jobs(self, text: str) -> list[Submitted]:
        """Jobs of a trace, in the order of the file.

        Raises:
            ValueError: with the number of the line that is malformed.
        """
        found = [_submitted(number, fields) for number, fields in self.lines(text)]
        if not found:
            raise ValueError("the trace has no jobs: give one with at least one line")
        return found


@dataclass(frozen=True)
class Tiresias(TraceColumns):
    """job_id,num_gpu,submit_time,iterations,model_name,duration,interval"""

    columns: tuple[tuple[str, str], ...] = (
        ("name", "job_id"),
        ("model", "model_name"),
        ("devices", "num_gpu"),
        ("arrival_seconds", "submit_time"),
        ("iterations", "iterations"),
    )

    def lines(self, text: str) -> Iterator[tuple[int, Mapping[str, str]]]:
        reader = csv.reader(text.splitlines())
        header = [name.strip() for name in next(reader, [])]
        missing = [name for _, name in self.columns if name not in header]
        if missing:
            raise ValueError(
                f"line 1: the header has no {missing[0]}: it must name {', '.join(dict(self.columns).values())}"
            )
        places = {ours: header.index(theirs) for ours, theirs in self.columns}
        for row in reader:
            if not row:
                continue
            if len(row) != len(header):
                raise ValueError(f"line {reader.line_num}: {len(row)} fields, the header has {len(header)}")
            yield reader.line_num, {ours: row[place].strip() for ours, place in places.items()}


@dataclass(frozen=True)
class Gavel(TraceColumns):
    """type, command, (directory,) option for steps, needs data, steps, scale factor, weight, objective, arrival"""

    widths: tuple[int, ...] = (9, 10)

    def lines(self, text: str) -> Iterator[tuple[int, Mapping[str, str]]]:
        """Jobs are named after their line."""
        for number, line in enumerate(text.splitlines(), start=1):
            fields = line.split("\t")
            if not line.strip():
                continue
            if len(fields) not in self.widths:
                raise ValueError(f"line {number}: {len(fields)} fields between tabs, there must be 9 or 10")
            # From the end, as older files lack the directory.
            model, steps, devices, arrival = fields[0], fields[-5], fields[-4], fields[-1]
            named = {"name": str(number), "model": model.strip(), "devices": devices}
            yield number, {**named, "arrival_seconds": arrival, "iterations": steps}


LAYOUTS: Mapping[str, TraceColumns] = {"tiresias": Tiresias(), "gavel": Gavel()}


def read_trace(path: str | Path, layout: TraceColumns) -> list[Submitted]:
    """Read the jobs of a trace from a file.

    Raises:
        ValueError: can't be read, or malformed: the line's number.
    """
    text = text_of(path, "give a trace")
    try:
        return layout.jobs(text)
    except ValueError as error:
        raise ValueError(f"{path}, {error}") from None


def queues(
    jobs: Sequence[Submitted], profiles: Mapping[str, Profile], pieces: int = PIECES, seed: int = 0
) -> list[Queue]:
    """Cut each job into that many pieces, as equal in iterations as possible.

    Args:
        profiles: by the trace's names of models; that under "" serves all others.

    Raises:
        ValueError: a model without profile, naming it.
    """
    if pieces < 1:
        raise ValueError(f"pieces must be at least 1, got {pieces}")
    random = Random(seed)
    return [_queue(job, _profile(job.model, profiles), pieces, random) for job in jobs]


def _queue(job: Submitted, profile: Profile, pieces: int, random: Random) -> Queue:
    count = min(pieces, job.iterations)
    parts = [job.iterations * (i + 1) // count - job.iterations * i // count for i in range(count)]
    step = job.devices * profile.model.seconds
    made = []
    for part in parts:
        draws = random.choices(profile.variation, k=min(part, DRAWS)) if profile.variation else [1.0]
        made.append(WorkPiece(step * part * (sum(draws) / len(draws))))
    return Queue(f"{job.name} {job.model}", tuple(made), job.arrival_seconds)


def _profile(model: str, profiles: Mapping[str, Profile]) -> Profile:
    found = profiles.get(model) or profiles.get("")
    if found is None:
        raise ValueError(f"no profile for {model!r}: give --profile '{model}=FILE', or --profile FILE for all models")
    return found


def _submitted(number: int, fields: Mapping[str, str]) -> Submitted:
    devices = _whole(number, "devices", fields["devices"])
    iterations = _whole(number, "iterations", fields["iterations"])
    try:
        arrival = float(fields["arrival_seconds"])
    except ValueError:
        arrival = -1.0
    if not (isfinite(arrival) and arrival >= 0):
        raise ValueError(f"line {number}: arrival must be 0 or more seconds, got {fields['arrival_seconds']!r}")
    return Submitted(fields["name"], fields["model"], devices, arrival, iterations)


def _whole(number: int, name: str, text: str) -> int:
    value = int(text) if text.strip().isdecimal() else 0
    if value < 1:
        raise ValueError(f"line {number}: {name} must be a whole number of 1 or more, got {text!r}")
    return value
