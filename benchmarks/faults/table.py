"""Faults, injected into real runs of the package: what becomes of the others.

    python benchmarks/faults.py                       # all, some ten minutes on two cores
    python benchmarks/faults.py --only "SIGSTOP|port"  # those whose group, fault or strategy match
    python benchmarks/faults.py --write docs/faults.md  # with --only: the other rows stay as they were measured

Two or three workers train a tiny model on this machine's processor, as processes, configured to wait 10 s for each
other. One thing is done to one of them; then the others

    goes on      all end well, and their result is finite, or exactly that of the undisturbed run where that is promised
    one line     end with an error of one line that the package, or whoever can mend it, wrote
    TRACEBACK    with anything else, or by a signal
    HANGS        still wait when the time is over
    CORRUPT      end well with a wrong result, or take what must be refused

The status is 1 where a row ends otherwise than it should.
"""

import argparse
import json
import os
import re
import shlex
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.paths import RESULTS

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from rich.console import Console

from common.hardware import description, sentence, slug
from faults.row import Place, Row
from faults.rows import rows
from faults.runs import GOES_ON, LINE, TRACEBACK, Outcome
from faults.worker import TIMEOUT_SECONDS

BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"
FIRST_PORT, PORTS = 12_000, 10  # below those that systems give to connections


@dataclass(frozen=True)
class Found:
    """One row, measured. right: whether that end was due."""

    group: str
    fault: str
    strategy: str
    outcome: str
    said: str
    right: bool
    seconds: float


def measured(row: Row, place: Place) -> Found:
    began = time.monotonic()
    place.folder.mkdir(parents=True)
    try:
        outcome = row.run(place)
    except Exception as error:  # of this script
        outcome = Outcome(TRACEBACK, f"the script itself: {type(error).__name__}: {error}")
    right = row.right(outcome)
    said = outcome.said.replace(str(place.folder), "...")
    return Found(row.group, row.fault, row.strategy, outcome.kind, said, right, round(time.monotonic() - began, 1))


def beside(chosen: Sequence[Row], folder: Path, seconds: float, jobs: int) -> Iterator[Found]:
    """Run several rows at a time, each in a process of its own; yield them in their order."""
    running: dict[int, int] = {}
    left, next_shown = list(enumerate(chosen)), 0
    while next_shown < len(chosen):
        while left and len(running) < jobs:
            index, row = left.pop(0)
            place = Place(folder / str(index), folder / "shared", FIRST_PORT + index * PORTS, seconds)
            running[_forked(row, place, folder / f"{index}.json")] = index
        if running:
            running.pop(os.wait()[0])
        while (folder / f"{next_shown}.json").exists():
            yield Found(**json.loads((folder / f"{next_shown}.json").read_text()))
            next_shown += 1


def _forked(row: Row, place: Place, result: Path) -> int:
    pid = os.fork()
    if pid == 0:
        found = measured(row, place)
        new = result.with_suffix(".new")
        new.write_text(json.dumps(asdict(found)))
        new.rename(result)
        os._exit(0)
    return pid


# ---- pages -----------------------------------------------------------------------------------------------------------


KINDS = {
    "a worker dies or hangs": ("a worker ends", r"killed|SIGSTOP", "worker 1 killed in a step",
                               "killed or stopped (SIGSTOP), from before the meeting to the end of the fit; elastic "
                               "pipelines go on"),
    "a worker raises": ("a worker ends", "raises", "worker 1 raises in a step",
                        "an exception at the same moments; elastic pipelines go on"),
    "a run is stopped": ("a run is stopped", "", "", "Ctrl-C or SIGTERM at one worker or all: no error, all end"),
    "numbers": ("numbers", "", "nan in a parameter of worker 1 before an update",
                "NaN, infinity or 1e30 in a parameter or buffer of one worker"),
    "files": ("files", "", "last.ckpt with one bit flipped",
              "checkpoints damaged, missing, mixed up or of another kind; full disks; killed while saving"),
    "settings that differ": ("settings that differ", "", "delay 0 beside 1",
                             "another option, model, precision or version on one worker"),
    "data": ("data", "", "3 batches beside 4", "fewer batches on one worker, or none"),
    "ports": ("ports", "", "a web server listens there", "another program or job has the port; garbage sent to it"),
    "places": ("places", "", "worker 1 with MASTER_ADDR that nobody knows", "wrong addresses, interfaces and ranks"),
    "one worker alone": ("one worker alone", "", "worker 1 calls log with sync_dist",
                         "one worker makes a collective call, or changes a tensor, that the others don't"),
    "sweeps": ("sweeps", "", "", "garbage at a sweep's socket; the sweep killed: its members end"),
    "input": ("input", "", "GossipStrategy(delay=1.5)", "options, words and commands of a wrong kind"),
}  # fmt: skip
"""{kind: (group, its faults, the one that is the example, what was done)}"""


def by_kind(found: Sequence[Found]) -> str:
    """The table of the page: faults counted by kind and end, and the line that one of them left."""
    lines = [
        "| kind | what was done | faults | go on | one line | for example |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for kind, (group, faults, example, done) in KINDS.items():
        here = [one for one in found if one.group == group and re.search(faults, one.fault)]
        said = next((f"`{_cell(one.said)}`" for one in here if one.fault == example and one.said), "")
        ends = [sum(one.outcome == end for one in here) for end in (GOES_ON, LINE)]
        lines.append(f"| {kind} | {done} | {len(here)} | {ends[0]} | {ends[1]} | {said} |")
    return "\n".join(lines)


def page(content: dict[str, Any]) -> str:
    """The whole table, as a report."""
    hardware = ", ".join(f"{key} {value}" for key, value in content["hardware"].items())
    found = [Found(**row) for row in content["rows"]]
    return f"# What happens when something goes wrong\n\n{hardware}.\n\n{markdown(found)}\n"


def markdown(found: Sequence[Found]) -> str:
    """Every fault in a row."""
    lines = ["| fault | strategy | what happened | seconds |", "| --- | --- | --- | --- |"]
    for one in found:
        what = one.outcome + (f": `{_cell(one.said)}`" if one.said else "")
        lines.append(f"| {_cell(one.fault)} | {one.strategy} | {what} | {one.seconds:g} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\u2223").replace("`", "'")


def written(page: str, found: Sequence[Found], about: str) -> str:
    """The page with this table between its two marks."""
    head, _, rest = page.partition(BEGIN)
    if not rest:
        raise ValueError(f"the page has no line {BEGIN}")
    lines = textwrap.fill(about, 118, break_long_words=False, break_on_hyphens=False)
    return f"{head}{BEGIN}\n{lines}\n\n{by_kind(found)}\n{END}{rest.partition(END)[2]}"


def raw(path: Path) -> tuple[dict[str, str], list[Found]]:
    """Hardware and rows of a result file."""
    content = json.loads(path.read_text())
    return content["hardware"], [Found(**row) for row in content["rows"]]


def merged(old: Sequence[Found], new: Sequence[Found], order: Sequence[Row]) -> list[Found]:
    """All rows, in order, of which some were measured anew; those that are no more are left out."""
    known = {(one.group, one.fault, one.strategy): one for one in (*old, *new)}
    return [known[key] for row in order if (key := (row.group, row.fault, row.strategy)) in known]


def publish(page: Path, found: Sequence[Found], some: bool) -> None:
    """The raw results and the page's table; some: of these rows, the others stay."""
    path = RESULTS / f"faults-{slug()}.json"
    command = f"`{shlex.join(['python', 'benchmarks/faults.py', *sys.argv[1:]])}`"
    about = f"{command}, {sentence()}; raw results in `benchmarks/results/{path.name}`."
    hardware = description()
    if some:
        processor, (hardware, before) = hardware["processor"], raw(path)  # that of most rows
        found = merged(before, found, rows())
        about = f"{about_of(page.read_text())} Later, rows of {command}, processor {processor}."
    path.write_text(json.dumps({"hardware": hardware, "rows": [asdict(one) for one in found]}, indent=1) + "\n")
    page.write_text(written(page.read_text(), found, about))


def about_of(page: str) -> str:
    """Return the page's text about its table: of the latest rows only the last command."""
    lines = page.partition(BEGIN)[2].strip().partition("\n\n")[0].splitlines()
    return " ".join(lines).partition(" Later, rows of ")[0]


# ---- command ---------------------------------------------------------------------------------------------------------


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a regular expression")
    parser.add_argument("--seconds", type=float, default=40.0, help="after so long whoever still runs hangs")
    parser.add_argument("--jobs", type=int, default=2, help="rows beside each other")
    parser.add_argument("--write", type=Path, help="the page that gets the table; raw results go to benchmarks/results")
    return parser.parse_args(arguments)


def main() -> None:
    chosen = options()
    torch.set_num_threads(1)
    kept = [row for row in rows() if re.search(chosen.only, f"{row.group}, {row.fault}, {row.strategy}")]
    if chosen.seconds <= TIMEOUT_SECONDS:
        sys.exit(f"error: --seconds must be more than the {TIMEOUT_SECONDS:g} s that workers wait for each other")
    found, console = [], Console(soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        (Path(folder) / "shared").mkdir()
        for one in beside(kept, Path(folder), chosen.seconds, chosen.jobs):
            found.append(one)
            mark = "   " if one.right else "***"
            line = f"{mark} {one.seconds:5.1f} s  {one.group}: {one.fault} ({one.strategy}): {one.outcome}: {one.said}"
            console.print(line, markup=False, highlight=False)
    wrong = [one for one in found if not one.right]
    console.print(f"{len(found) - len(wrong)} of {len(found)} rows end as they should")
    if chosen.write:
        publish(chosen.write, found, bool(chosen.only))
    sys.exit(bool(wrong))
