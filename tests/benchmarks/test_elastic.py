"""What is made of the lines that elastic workers have written; the page's tables find their places."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from elastic import beyond_a_step, ended, lines, median_step, took
from measured import PAGE, written


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
    page = PAGE.read_text()
    assert written(page) == page
    with pytest.raises(AssertionError, match="0 tables of faults"):
        written(page.replace("| end | faults |", "| ends | faults |"))
