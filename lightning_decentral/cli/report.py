"""`lightning-decentral report RUN RUN ...`: losses of several runs over steps, seconds and bytes, side by side.

The command reads the files of a CSVLogger or `Report`. Seconds and bytes are those that `SpeedMonitor` logged, without
set-up and validation; a window that `SpeedMonitor` leaves out counts as fast as the next one."""

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from lightning_decentral.cli.console import answer, numbers_table
from lightning_decentral.shared.plan.figure import LOSSES, VALIDATION_LOSSES, Curve, Rows, compare, curve
from lightning_decentral.shared.plan.units import shown_bytes

FILES = ("metrics.csv", "report.csv")  # of a CSVLogger and of the callback `Report`
STEP_SECONDS, BYTES, WAITED = "speed/step_seconds", "speed/bytes_per_second", "speed/wait_share"
AXES = ("steps", "seconds", "MB sent by worker 0")


@dataclass(frozen=True)
class Run:
    """JSON row of a run: its whole length, and the point from which its loss was at most the target."""

    name: str
    loss: float
    steps: int
    step_seconds: float | None
    seconds: float | None
    sent_bytes: float | None
    wait_share: float | None
    target_steps: int
    target_seconds: float | None
    target_bytes: float | None


@dataclass(frozen=True)
class Compared:
    """JSON answer of `report`: `loss` is the compared key, `target` the least value that every run reached."""

    loss: str
    target: float
    runs: list[Run]


def rows_of(run: Path) -> list[dict[str, float]]:
    """Read a run's logged metrics, one row per step; of a resumed run the later file's, where both have a step.
    ValueError: no file of metrics, none with rows, or the files of several runs."""
    found = [run] if run.is_file() else next(filter(None, (sorted(run.rglob(name)) for name in FILES)), [])
    if not found:
        there = f"there is no {' or '.join(FILES)} in {run}" if run.exists() else f"there is no {run}"
        raise ValueError(f"{there}: name the folder of a run with a CSVLogger (logger=csv, on in the recipes)")
    # version_0, version_1, ...: a training that was resumed begins another file, whose steps go on.
    parts = sorted(filter(None, map(_read, found)), key=lambda rows: min(rows))
    if not parts:
        raise ValueError(f"{', '.join(map(str, found))} has no rows with a step: the run ended before it logged any")
    alike = any(min(a) == min(b) for a, b in pairwise(parts)) or len({file.parent.parent for file in found}) > 1
    if len(parts) > 1 and (alike or not all(file.parent.name.startswith("version_") for file in found)):
        raise ValueError(f"{run} holds several runs: name one of {', '.join(str(file.parent) for file in found)}")
    ends = [*(min(later) for later in parts[1:]), inf]
    whole = {step: row for rows, end in zip(parts, ends, strict=True) for step, row in rows.items() if step < end}
    return [whole[step] for step in sorted(whole)]


def _read(path: Path) -> dict[float, dict[str, float]]:
    rows: dict[float, dict[str, float]] = defaultdict(dict)
    with path.open(newline="") as file:
        for read in csv.DictReader(file):
            row = {key: value for key, value in _numbers(read) if not key.startswith("test")}  # it counts one step on
            if set(row) - {"step", "epoch"} and "step" in row:
                rows[row["step"]] |= row
    return dict(rows)


def _numbers(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for key, text in row.items():
        try:
            yield key, float(text)
        except (TypeError, ValueError):
            continue  # empty, a text, or a row that was cut short


def compared_key(runs: Mapping[str, Rows], asked: str | None) -> str:
    """Key of a loss that all runs logged, the validation loss if possible. ValueError: there is none."""
    known = set.intersection(*({key for row in rows for key in row} for rows in runs.values()))
    keys = (asked,) if asked else (*VALIDATION_LOSSES, *LOSSES)
    if shared := next((key for key in keys if key in known), None):
        return shared
    logged = ", ".join(sorted(key for key in known if "/" in key or "loss" in key)) or "nothing"
    raise ValueError(f"not every run logged {' or '.join(keys)}: name a key with --loss; all of them logged {logged}")


def spent(rows: Rows, key: str | None, steps: Sequence[float]) -> list[float] | None:
    """Amounts spent after each of `steps`, as SpeedMonitor logged: seconds, or seconds times the rate of `key`."""
    known = [row for row in rows if STEP_SECONDS in row and (key is None or key in row)]
    if not known:
        return None
    rates = [row[STEP_SECONDS] * (1.0 if key is None else row[key]) for row in known]
    ends = [0.0, *(row["step"] + 1 for row in known[:-1]), max(known[-1]["step"], rows[-1]["step"]) + 1]
    total = np.concatenate([[0.0], np.cumsum(np.diff(ends) * rates)])
    return [float(value) for value in np.interp(steps, ends, total)]


def run_of(name: str, rows: Rows, loss: Curve, target: float) -> Run:
    whole = rows[-1]["step"] + 1
    reached = next(step for step, value in zip(*loss, strict=True) if value <= target)
    nothing: list[float | None] = [None, None]
    seconds, sent = (spent(rows, key, [whole, reached]) or nothing for key in (None, BYTES))
    waits = [row[WAITED] for row in rows if WAITED in row]
    return Run(
        name=name,
        loss=min(loss[1]),
        steps=int(whole),
        step_seconds=None if seconds[0] is None else seconds[0] / whole,
        seconds=seconds[0],
        sent_bytes=sent[0],
        wait_share=sum(waits) / len(waits) if waits else None,
        target_steps=int(reached),
        target_seconds=seconds[1],
        target_bytes=sent[1],
    )


def run(options: argparse.Namespace) -> None:
    paths = {path.resolve(): path for path in options.runs}  # each once
    short = {path.name: path for path in paths}
    names = {path: path.name if len(short) == len(paths) else str(given) for path, given in paths.items()}
    rows = {names[path]: rows_of(path) for path in paths}
    key = compared_key(rows, options.loss)
    losses: dict[str, Curve] = {}
    for name, own in rows.items():
        steps, values = curve([row for row in own if isfinite(row.get(key, 0.0))], key)
        if not steps:
            raise ValueError(f"{key} of {name} was never a finite number: leave that run out, or name another --loss")
        losses[name] = [step + 1 for step in steps], values
    target = max(min(values) for _, values in losses.values())
    found = Compared(key, target, [run_of(name, rows[name], losses[name], target) for name in rows])
    panels = [
        {name: (x, y) for name, (steps, y) in losses.items() if (x := _over(axis, rows[name], steps)) is not None}
        for axis in AXES
    ]
    answer(options, found, *_tables(found), *_drawn(panels, key, options.plot))


def _over(axis: str, rows: Rows, steps: list[float]) -> list[float] | None:
    if axis == AXES[0]:
        return steps
    found = spent(rows, None if axis == AXES[1] else BYTES, steps)
    return found if axis == AXES[1] or found is None else [value / 1e6 for value in found]


def _drawn(panels: Sequence[dict[str, Curve]], key: str, path: Path | None) -> list[str]:
    if path is None:
        return ["a picture of them: --plot comparison.png"]
    try:
        compare(dict(zip(AXES, panels, strict=True)), key, path)
    except (OSError, ValueError) as error:
        raise ValueError(f"--plot {path}: {error}") from None
    return [f"picture: {path}"]


def _tables(found: Compared) -> list[Table | str]:
    whole = numbers_table("run", f"least {found.loss}", "steps", "s a step", "seconds", "sent", "waited")
    target = numbers_table("run", "steps", "seconds", "sent")
    for run in found.runs:
        share = "" if run.wait_share is None else f"{run.wait_share:.1%}"
        own = f"{run.loss:.4g}", str(run.steps), _number(run.step_seconds), _number(run.seconds)
        whole.add_row(run.name, *own, _bytes(run.sent_bytes), share)
        target.add_row(run.name, str(run.target_steps), _number(run.target_seconds), _bytes(run.target_bytes))
    untimed = [run.name for run in found.runs if run.seconds is None]
    remedy = "the callback SpeedMonitor, on in the recipes, logs them from its second window on"
    until = f"until {found.loss} was {found.target:.4g}, which all of them reached:"
    return [
        "whole runs (seconds, bytes and waits are worker 0's):",
        whole,
        until,
        target,
        *([f"no seconds of {', '.join(untimed)}: {remedy}"] if untimed else []),
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _bytes(value: float | None) -> str:
    return "" if value is None else shown_bytes(value)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder with what a CSVLogger wrote")
    parser.add_argument("--loss", help="key to compare (default: validation loss, or the training's)")
    parser.add_argument("--plot", type=Path, help="picture to write: comparison.png")
    parser.set_defaults(run=run, outputs=("plot",))
