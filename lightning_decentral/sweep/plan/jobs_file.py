"""Jobs file (YAML): jobs as pieces in seconds, as steps of a measured profile, or as real trainings.

    jobs:
      - name: small
        pieces: [0.2, 0.1, {compute_seconds: 0.3, load_seconds: 0.1}]
        repeat: 5
      - name: vit
        profile: vit.json
        steps: 50
        shards: 4
        load_bytes_per_second: 12e9
        arrival_seconds: 1.5
      - name: wide
        overrides: [recipe=vit, model.config.hidden_size=96, trainer.max_steps=40]

A step of a model in n shards is 2 n pieces: n forward, n backward, in which a shard runs forward again. Each piece
loads its shard's parameters: load = bytes / rate, 0 without a rate. A step of a training is one piece.

Jobs that use several devices at once have their own files:

    jobs:                                                        # --policy jigsaw: seconds of a piece for each device
      - {name: a, seconds: [2.0, 3.0], iterations: 100}
      - {name: b, forward_seconds: 1.0, backward_seconds: 2.0, depths: [0.5, 1.0], iterations: 80}

    jobs:                                                        # --policy spase: devices: seconds of the whole job
      - {name: a, seconds: {1: 8.0, 2: 4.5}}
      - {name: b, seconds: {1: 9.0, 2: 5.0}, parallelism: {1: one_device, 2: ddp}, overrides: [trainer.max_steps=40]}
"""

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lightning_decentral.shared.plan.arguments import text_of
from lightning_decentral.shared.plan.linear_partition import balanced_partition
from lightning_decentral.shared.plan.profile import BlockCost, Model, read
from lightning_decentral.sweep.plan.dispatch import Queue, WorkPiece, refuse_one_name_for_two
from lightning_decentral.sweep.plan.gangs import Gang, of_depths
from lightning_decentral.sweep.plan.spase import Table

WHEN = ("arrival_seconds", "memory_bytes")
WRITTEN = ("name", "pieces", "repeat", *WHEN)
MEASURED = ("name", "profile", "steps", "shards", "load_bytes_per_second", *WHEN)
TRAINED = ("name", "overrides", "profile", "seconds", "parallelism", *WHEN)
PLACED = ("name", "seconds", "iterations")
DEEP = ("name", "forward_seconds", "backward_seconds", "depths", "iterations")
ALLOCATED = ("name", "seconds", "parallelism", "overrides")
PIECE = ("compute_seconds", "load_seconds")


@dataclass(frozen=True)
class Training:
    """Job that is a real training; each of its steps is a piece."""

    name: str
    overrides: tuple[str, ...]  # on the command line of `recipes/train.py`
    steps: int  # `trainer.max_steps` among them
    step_seconds: float | None = None  # from its profile; None: to be measured
    arrival_seconds: float = 0.0
    memory_bytes: float = 0.0

    def queue(self, seconds: Sequence[float]) -> Queue:
        return Queue(self.name, tuple(map(WorkPiece, seconds)), self.arrival_seconds, self.memory_bytes)


@dataclass(frozen=True)
class Jobs:
    """Jobs of a file, each kind in order: queues of pieces without a training, and trainings."""

    queues: tuple[Queue, ...]
    trainings: tuple[Training, ...] = ()


def read_jobs(path: str | Path) -> Jobs:
    """Read jobs from a YAML file; profiles are looked for next to the file. ValueError: unreadable, no list of jobs, an
    unknown key, not a number, two jobs with one name."""
    placed = [(job, Path(path).parent, place) for job, place in _entries(path)]
    queues = tuple(_queue(*entry) for entry in placed if "overrides" not in entry[0])
    return Jobs(queues, tuple(_training(*entry) for entry in placed if "overrides" in entry[0]))


def _entries(path: str | Path) -> list[tuple[Mapping[str, Any], str]]:
    """Return (job, its place in the file for messages) of each job."""
    text = text_of(path, "give a YAML file of jobs")
    try:
        found = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=True)
    except OSError:  # by OmegaConf, for a number or a text alone
        found = text.strip()
    except (YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"{path} isn't a YAML file of jobs: {' '.join(str(error).split())}") from None
    jobs = found.get("jobs") if isinstance(found, dict) else None
    if not isinstance(jobs, list) or not jobs:
        raise ValueError(f"{path} must have a list of one or more `jobs`, got {jobs!r}")
    for number, job in enumerate(jobs, start=1):
        if not isinstance(job, dict) or "name" not in job:
            raise ValueError(f"{path}, job {number}: each job needs a name, got {job!r}")
    refuse_one_name_for_two([str(job["name"]) for job in jobs])
    return [(job, f"{path}, job {number}") for number, job in enumerate(jobs, start=1)]


def are_trainings(path: str | Path) -> bool:
    """Return whether a jobs file has trainings; ValueError: as `read_jobs`."""
    return any("overrides" in job for job, _ in _entries(path))


def read_gangs(path: str | Path) -> list[Gang]:
    """Read a jobs file for JigSaw: an iteration has a piece for each device. ValueError: as `read_jobs`, and for a job
    with neither a list of `seconds` nor depths."""
    gangs = []
    for job, place in _entries(path):
        name, iterations = str(job["name"]), _count(job, "iterations", place, 1)
        if "depths" in job:
            _known(job, DEEP, place)
            forward, backward = (_number(job, f"{part}_seconds", place, None) for part in ("forward", "backward"))
            gangs.append(of_depths(name, forward, backward, _numbers(job, "depths", place), iterations))
        elif isinstance(job.get("seconds"), list):
            _known(job, PLACED, place)
            gangs.append(Gang(name, _numbers(job, "seconds", place), iterations))
        else:
            raise ValueError(
                f"{place}: --policy jigsaw needs seconds of a piece for each device, seconds: [2.0, 3.0], or "
                f"forward_seconds, backward_seconds and depths, got {dict(job)}"
            )
    return gangs


def read_tables(path: str | Path, *, trained: bool = False) -> list[Table]:
    """Read a jobs file for SPASE: each job's seconds by number of devices; with `trained`, trainings without are left
    out. ValueError: as `read_jobs`, and for a job without a table of `seconds`, or without `parallelism` if `trained`.
    """
    tables = []
    for job, place in _entries(path):
        found, ways = job.get("seconds"), job.get("parallelism", {})
        if trained and found is None and "overrides" in job:
            _known(job, ALLOCATED, place)
            continue
        if not isinstance(found, dict) or not all(isinstance(devices, int) for devices in found):
            raise ValueError(
                f"{place}: --policy spase needs a table of seconds of the whole job by devices, "
                f"seconds: {{1: 8.0, 2: 4.5}}, got {dict(job)}"
            )
        _known(job, ALLOCATED, place)
        if not isinstance(ways, dict) or (trained and found.keys() - ways.keys()):
            raise ValueError(
                f"{place}: a training needs its parallelism by devices: {{1: one_device, 2: ddp}}, got {ways}"
            )
        seconds = {devices: _number(found, devices, place, None) for devices in found}
        tables.append(Table(str(job["name"]), seconds, {k: str(way) for k, way in ways.items()}))
    return tables


def _training(job: Mapping[str, Any], folder: Path, place: str) -> Training:
    _known(job, TRAINED, place)
    name, overrides = str(job["name"]), job["overrides"]
    if "/" in name:
        raise ValueError(f"{place}: the name {name!r} also names a folder: leave out the /")
    if not isinstance(overrides, list) or not all(isinstance(one, str) for one in overrides):
        raise ValueError(f"{place}: overrides must be a list of texts such as optimizer.lr=1e-3, got {overrides!r}")
    seconds = read(folder / str(job["profile"])).model.seconds if "profile" in job else None
    when = {key: _number(job, key, place, 0.0) for key in WHEN}
    Queue(name, (WorkPiece(0.0),), **when)  # raises if the job can't be scheduled, before anything is measured
    # The last override of the steps decides, as it does for Hydra.
    found = [match[1] for one in overrides if (match := re.fullmatch(r"\+{0,2}trainer\.max_steps=(.*)", one))]
    if not found or not found[-1].isdecimal() or int(found[-1]) < 1:
        got = f", got {found[-1]}" if found else ""
        raise ValueError(f"{place}: the number of steps is missing{got}: add an override such as trainer.max_steps=40")
    return Training(name, tuple(overrides), int(found[-1]), seconds, **when)


def _queue(job: Mapping[str, Any], folder: Path, place: str) -> Queue:
    if ("pieces" in job) == ("profile" in job):
        raise ValueError(
            f"{place}: give either pieces, a profile, or overrides of a training; "
            "jobs with seconds or depths are for --policy jigsaw or spase"
        )
    _known(job, MEASURED if "profile" in job else WRITTEN, place)
    when = {key: _number(job, key, place, 0.0) for key in WHEN}
    if "profile" in job:
        model = read(folder / str(job["profile"])).model
        rate = _number(job, "load_bytes_per_second", place, float("inf"))
        if not rate > 0:
            raise ValueError(f"{place}: load_bytes_per_second must be more than 0, got {rate:g}")
        pieces = step_pieces(model, _count(job, "shards", place, 1), rate) * _count(job, "steps", place, 1)
        return Queue(str(job["name"]), tuple(pieces), **when)
    if not isinstance(job["pieces"], list):
        raise ValueError(f"{place}: pieces must be a list, got {job['pieces']!r}")
    pieces = []
    for number, piece in enumerate(job["pieces"], start=1):
        written, at = piece if isinstance(piece, dict) else {"compute_seconds": piece}, f"{place}, piece {number}"
        _known(written, PIECE, at)
        pieces.append(WorkPiece(**{key: _number(written, key, at, 0.0) for key in PIECE}))
    return Queue(str(job["name"]), tuple(pieces * _count(job, "repeat", place, 1)), **when)


def step_pieces(model: Model, shards: int = 1, load_bytes_per_second: float = float("inf")) -> list[WorkPiece]:
    """List the pieces of a training step: the whole batch in one shard, otherwise forward and backward of each shard.
    ValueError: more shards than blocks."""
    if shards == 1:
        return [WorkPiece(model.seconds, model.parameter_bytes / load_bytes_per_second)]
    groups = split(model.blocks, shards)
    forward = [sum(b.forward_seconds for b in group) for group in groups]
    behind = [sum(b.backward_seconds + b.update_seconds for b in group) for group in groups]
    loads = [sum(b.parameter_bytes for b in group) / load_bytes_per_second for group in groups]
    there = [WorkPiece(f, load) for f, load in zip(forward, loads, strict=True)]
    # Forward again, as only the shard's input was kept.
    back = [WorkPiece(f + b, load) for f, b, load in zip(forward, behind, loads, strict=True)]
    return [*there, *reversed(back)]


def split(blocks: Sequence[BlockCost], shards: int) -> list[list[BlockCost]]:
    """Split blocks into consecutive groups, none empty: smallest largest bytes, then the least sum of squares.
    ValueError: more shards than blocks."""
    if shards > len(blocks):
        raise ValueError(f"{shards} shards need as many blocks, the profile has {len(blocks)}: give fewer shards")
    at = balanced_partition([block.parameter_bytes for block in blocks], shards)
    return [list(blocks[start:end]) for start, end in pairwise(at)]


def _known(entry: Mapping[str, Any], keys: Sequence[str], place: str) -> None:
    unknown = [str(key) for key in entry if key not in keys]
    if unknown:
        raise ValueError(f"{place}: unknown key {unknown[0]!r}, known are {', '.join(keys)}")


def _numbers(entry: Mapping[str, Any], key: str, place: str) -> tuple[float, ...]:
    if not isinstance(entry[key], list):
        raise ValueError(f"{place}: {key} must be a list of numbers, one for each device, got {entry[key]!r}")
    return tuple(_number({key: value}, key, place, None) for value in entry[key])


def _number(entry: Mapping[Any, Any], key: str | int, place: str, default: float | None) -> float:
    """Read a number; a default of None: the key is required."""
    value = entry.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):  # to Python, True is a number
        raise ValueError(f"{place}: {key} must be a number, got {value!r}")
    return float(value)


def _count(entry: Mapping[str, Any], key: str, place: str, default: int) -> int:
    value = entry.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{place}: {key} must be a whole number of 1 or more, got {value!r}")
    return value
