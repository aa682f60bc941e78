"""What is made of the lines that elastic workers have written; the page's tables find their places."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.costs import beyond_a_step, ended, median_step, resize
from elastic.run import Here, Run, lines, took
from elastic.worker import Job
from pages.measured import PAGES, TABLES, written


def test_a_longest_step_is_sought_soon_after_a_kill() -> None:
    usual = [(float(at), 1.0) for at in range(10)]
    assert beyond_a_step([*usual, (10.0, 1.5), (11.0, 1.0), (30.0, 9.0)], 9.5) == 8.0  # the third step
    late = [(10.0 + n / 10, 1.0) for n in range(20)]
    assert beyond_a_step([*usual, *late[:12], (12.0, 7.0)], 9.5) == 0.0
    assert beyond_a_step([*usual, *late[:4], (10.45, 3.0), *late[5:]], 9.5) == 2.0


def test_a_run_is_counted_by_what_its_workers_did(tmp_path: Path) -> None:
    said: dict[str, list[dict[str, Any]]] = {
        "a": [{"kind": "step", "at": step, "step": step} for step in range(1, 31)] + [{"kind": "end", "loss": 2.0}],
        "b": [{"kind": "step", "at": step + 0.5, "step": step} for step in range(1, 26)],
    }
    for name, rows in said.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "st')
    job = SimpleNamespace(workers=2, folder=tmp_path)
    run: Any = SimpleNamespace(job=job, names=["a", "b"], said=lambda n, kind: lines(tmp_path / f"{n}.jsonl", kind))
    found = ended(run)
    assert found == {"steps": 10, "seconds": 9.0, "participation": 15 / 20, "loss": 2.0, "ended": 1}
    assert took(run.said("a", "step"))[0] == (2, 1)
    assert median_step(job) == 1  # type: ignore[arg-type]


def test_tables_are_written_where_they_stand() -> None:
    for page, tables in PAGES.items():
        assert written(page.read_text(), tables) == page.read_text()
    with pytest.raises(AssertionError, match="0 tables of faults"):
        written(next(iter(PAGES)).read_text().replace("| of them | goes on |", "| of all | goes on |"), TABLES)


class Links(Here):
    """Notes what would be done."""

    def __init__(self) -> None:
        self.done: list[tuple[int, str]] = []

    def link(self, index: int, to: str) -> None:
        self.done.append((index, to))


def test_a_cut_link_is_that_of_the_workers_host_and_is_mended(tmp_path: Path) -> None:
    place = Links()
    run = Run(Job(tmp_path, 3, 1, 0.0, 5.0), place)
    run.alive, run.hosts = {"w2": None, "w4": None}, {"w2": 3, "w4": 1}
    mend = run.begin("cut", "w2")
    assert place.done == [(3, "down")]
    run.alive, run.hosts = {"w4": None}, {"w4": 1}  # it was killed meanwhile
    mend()
    assert place.done == [(3, "down"), (3, "up")]


def test_the_oldest_go_and_new_ones_come_until_the_number_is_there() -> None:
    alive, killed = {"w0": 0, "w1": 0, "w2": 0}, list[str]()

    def kill(name: str) -> None:
        killed.append(name)
        alive.pop(name)

    def step() -> None:
        for name in alive:
            alive[name] += 1

    def until(holds: Callable[[], bool]) -> None:
        while not holds():
            step()

    run: Any = SimpleNamespace(alive=alive, kill=kill, until=until, said=lambda name, kind: [0] * alive[name])
    run.is_over = lambda: len(killed) == 3
    run.start = lambda: alive.update({f"w{len(alive) + len(killed)}": 0})
    resize(run, 1)
    assert (killed, alive) == (["w0", "w1"], {"w2": 6})
    resize(run, 3)
    assert alive == {"w2": 12, "w3": 6, "w4": 6}
    with pytest.raises(ValueError, match="ended before 2 workers took part: give more --storm-steps"):
        resize(run, 2)
