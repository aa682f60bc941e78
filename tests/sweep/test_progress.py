"""What the user of a sweep reads, against sums by hand."""

import io
from pathlib import Path
from typing import Any

import pytest
from hydra.core.utils import JobStatus
from omegaconf import OmegaConf
from rich.console import Console

from lightning_decentral.shared.plan.timeline import Span
from lightning_decentral.sweep import LRTF, gantt
from lightning_decentral.sweep import progress as table
from lightning_decentral.sweep.launcher import distinguished
from lightning_decentral.sweep.member import SweepMember, returned
from lightning_decentral.sweep.plan.arbiter import Arbiter, TurnReport
from lightning_decentral.sweep.plan.policy import Scoreboard
from lightning_decentral.sweep.progress import best_line, standings
from lightning_decentral.sweep.server import Sweep


def member(name: str, *words: str) -> SweepMember:
    return SweepMember(name, words, OmegaConf.create({"hydra": {"overrides": {"task": []}}}), Path("sweep", name))


@pytest.fixture
def sweep() -> Sweep:
    """Member 0 has ended after 4 s, 1 runs and needs 6 s more, 2 waits and needs 2 s, 3 hasn't started."""
    arbiter = Arbiter(LRTF(), ["cpu:0", "cpu:1"])
    starts: Any = None
    sweep = Sweep([member(str(i), f"lr={i}") for i in range(4)], arbiter, starts, table.LiveTable(), alive=3)
    for name in "012":
        arbiter.join(name)
    arbiter.request("0")
    arbiter.settle(0.0)
    arbiter.leave("0", 4.0)
    sweep.outcomes["0"] = returned(sweep.members["0"], JobStatus.COMPLETED, 0.5)
    arbiter.members["1"].turn = TurnReport(0.25, 6.0)
    arbiter.members["2"].turn = TurnReport(None, 2.0)
    arbiter.request("1")
    arbiter.settle(4.0)
    return sweep


def test_the_predicted_end_is_that_of_the_longest_or_of_all(sweep: Sweep) -> None:
    # The third one is expected to be as long as the mean of 4, 6 and 2.
    assert table.seconds_left(sweep) == max(6.0, (6 + 2 + 4) / 2)
    sweep.arbiter.members["1"].turn = TurnReport(0.25, 20.0)
    assert table.seconds_left(sweep) == max(20.0, (20 + 2 + 26 / 3) / 2)


def test_the_table_shows_everyone(sweep: Sweep) -> None:
    sweep.began -= 8.0  # now is 8
    assert table.shares(sweep) == pytest.approx({"0": 4 / 16, "1": 4 / 16, "2": 0.0}, abs=0.01)
    text = io.StringIO()
    Console(file=text, width=140).print(table.picture(sweep))
    lines = text.getvalue().splitlines()
    assert lines[0].startswith("1 of 4 members ended, devices busy 50%, end in 0:00:06")
    rows = [line for line in lines if "lr=" in line]
    states = ("done", "running on cpu:0", "on the host", "not started")
    assert all(state in row for state, row in zip(states, rows, strict=True))


def test_the_live_table_is_drawn_on_a_terminal_and_lines_stand_above_it(sweep: Sweep) -> None:
    text = io.StringIO()
    with table.LiveTable(Console(file=text, width=140, force_terminal=True)) as watcher:
        watcher.show(sweep)
        watcher.ended(sweep.members["2"], returned(sweep.members["2"], JobStatus.FAILED, ValueError("no [luck]")))
    assert "1 of 4 members ended" in text.getvalue()
    assert "#2 : lr=2 : failed, ValueError: no [luck]; its log: sweep/2/member.log" in text.getvalue()


def test_the_ranking_puts_the_lowest_first_and_failures_last() -> None:
    members = [member(str(i), f"lr={i}", "names=[a,b]") for i in range(4)]
    values = [
        (JobStatus.COMPLETED, 2.0),
        (JobStatus.FAILED, ValueError()),
        (JobStatus.COMPLETED, 1),
        (JobStatus.COMPLETED, None),
    ]
    outcomes = {e.name: returned(e, *value) for e, value in zip(members, values, strict=True)}
    ranked = standings(members, outcomes, Scoreboard())
    assert [one.member.name for one in ranked] == ["2", "0", "1", "3"]
    assert [one.status for one in ranked] == ["completed", "completed", "failed", "completed"]
    assert best_line(ranked) == "best: lr=2 'names=[a,b]' (returned 1)"
    assert best_line(ranked[2:]) is None


def test_words_that_all_have_tell_nobody_apart() -> None:
    both = distinguished([member("0", "recipe=vit", "lr=1"), member("1", "recipe=vit", "lr=2")])
    assert [one.own_overrides for one in both] == [("lr=1",), ("lr=2",)]
    assert distinguished([member("0", "lr=1")])[0].own_overrides == ("lr=1",)


def test_a_gantt_chart_has_a_row_per_device_and_a_colour_per_job(tmp_path: Path) -> None:
    spans = {"a/0": Span("cpu:0", 1.0, 2.0), "b/0": Span("cpu:1", 1.5, 3.0), "a/1": Span("cpu:1", 3.0, 4.0)}
    gantt.draw({"sweep": gantt.bars_of_sweep(spans)}, tmp_path / "gantt.svg")
    drawn = (tmp_path / "gantt.svg").read_text()
    assert all(f"<!-- {text} -->" in drawn for text in ("cpu:0", "cpu:1", "a", "b", "seconds"))
    gantt.draw({"nobody": []}, tmp_path / "empty.png")
    assert [bar.job for bar in gantt.bars_of_sweep({"alone": spans["a/0"], "a/1": spans["a/0"]})] == ["a", "alone"]
