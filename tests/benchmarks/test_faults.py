"""The table of faults is that of the committed raw results, and ends of runs are told apart."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from faults.rows import rows
from faults.runs import CORRUPT, GOES_ON, HANGS, LINE, TRACEBACK, Process, Run, judged
from faults.table import BEGIN, END, KINDS, RESULTS, about_of, by_kind, markdown, merged, options, raw, written
from faults.worker import record_of
from lightning_decentral.shared.errors import MissingExtra
from pages.reports import report
from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "faults.md"


def test_the_page_shows_the_raw_results() -> None:
    (path,) = RESULTS.glob("faults-*.json")
    hardware, found = raw(path)
    text = PAGE.read_text()
    assert text.partition(BEGIN)[2].partition(END)[0].strip().endswith(by_kind(found))
    assert all(f"{key} {value}" in " ".join(text.split()) for key, value in hardware.items())
    assert path.name in text


def test_the_page_is_short_and_its_kinds_hold_every_fault_once() -> None:
    found = raw(RESULTS / "faults-2-cores.json")[1]
    cells = [line.split(" | ") for line in by_kind(found).splitlines()[2:]]
    assert len(cells) == len(KINDS) == 12
    assert sum(int(row[2]) for row in cells) == len(found)
    assert all(int(row[2]) == int(row[3]) + int(row[4]) for row in cells)
    examples = [(group, example) for group, _, example, _ in KINDS.values() if example]
    assert {(one.group, one.fault) for one in found} >= set(examples)
    assert len(PAGE.read_text().split()) <= 900


def test_the_report_has_every_fault() -> None:
    found = raw(RESULTS / "faults-2-cores.json")[1]
    assert markdown(found) in report("faults-2-cores")
    assert all(f"| {one.fault.replace('|', '/')} | {one.strategy} |" in markdown(found) for one in found)


def test_every_row_is_another_one_and_stands_in_the_table() -> None:
    (path,) = RESULTS.glob("faults-*.json")
    names = [(row.group, row.fault, row.strategy) for row in rows()]
    assert len(set(names)) == len(names) > 150
    assert names == [(one.group, one.fault, one.strategy) for one in raw(path)[1]]


class Ended(Process):
    """A process that has ended so."""

    def __init__(self, folder: Path, said: dict[str, Any] | None, status: int = 1, printed: str = "") -> None:
        super().__init__(0, folder / "record", folder / "output", status)
        self.record.write_text("" if said is None else json.dumps(said))
        self.output.write_text(printed)


def raised(error: BaseException) -> dict[str, Any]:
    try:
        raise error
    except BaseException as caught:
        return record_of(caught)


FINISHED: dict[str, Any] = {"kind": "finished"}


@pytest.mark.parametrize(
    ("said", "status", "printed", "kind"),
    [
        (FINISHED, 0, "", GOES_ON),
        (raised(ValueError("delay=-1: at least 0")), 1, "", LINE),
        (raised(MissingExtra("pip install it")), 1, "", LINE),
        (raised(ValueError("two\nlines")), 1, "", TRACEBACK),
        (raised(RuntimeError("anything")), 1, "", TRACEBACK),
        (raised(OSError("[/gloo/transport/tcp/pair.cc:553] closed")), 1, "", TRACEBACK),
        (None, -6, "terminate called", TRACEBACK),
    ],
)
def test_ends_are_told_apart(said: dict[str, Any] | None, status: int, printed: str, kind: str, tmp_path: Path) -> None:
    run = Run(tmp_path, 1.0, [Ended(tmp_path, said, status, printed)])
    assert judged(run, (), lambda: None).kind == kind
    assert judged(run, (0,), lambda: None).kind == GOES_ON, "a victim isn't asked"


def test_a_wrong_result_and_a_late_worker_are_found(tmp_path: Path) -> None:
    run = Run(tmp_path, 1.0, [Ended(tmp_path, FINISHED, 0)])
    assert judged(run, (), lambda: "x isn't finite").kind == CORRUPT
    run.late = [0]
    assert judged(run, (), lambda: None).kind == HANGS


def test_the_table_goes_between_the_marks_and_nothing_else_changes() -> None:
    (path,) = RESULTS.glob("faults-*.json")
    _, found = raw(path)
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    new = written(page, found[:2], "about")
    assert new.startswith(f"before\n{BEGIN}\nabout\n\n| kind |")
    assert new.endswith(f"{END}\nafter\n")
    assert written(new, found[:2], "about") == new
    with pytest.raises(ValueError, match="has no line"):
        written("", found, "about")


def test_rows_measured_anew_stand_in_the_place_of_the_old_and_the_page_says_so() -> None:
    (path,) = RESULTS.glob("faults-*.json")
    _, found = raw(path)
    gone = replace(found[0], fault="a fault that is no row any more")
    anew = replace(found[5], seconds=99.0)
    assert merged([*found, gone], [anew], rows()) == [*found[:5], anew, *found[6:]]
    about = "`first` on this machine."
    page = written(f"{BEGIN}\n{END}", found[:2], f"{about} Later, rows of `second`.")
    assert about_of(page) == about


def test_what_the_command_takes() -> None:
    assert options(["--only", "port", "--seconds", "20", "--write", "docs/faults.md"]).seconds == 20
