"""`lightning-decentral schedule --policy jigsaw` and `--policy spase`: the page's files, the library's own numbers."""

import json
import sys
from pathlib import Path

import pytest

from lightning_decentral.recipes import command as cli
from lightning_decentral.shared.plan.profile import BlockCost, Model, Profile, write
from lightning_decentral.sweep.plan.gangs import ComplementaryPairing, ExactGangs, Gang, Unaware, ordered, staircase
from lightning_decentral.sweep.plan.jobs_file import read_gangs, read_tables
from lightning_decentral.sweep.plan.spase import ExactSpase, GreedySpase, Table
from tests.docs.pages import ROOT, blocks

_, GANGS, TABLES = blocks(ROOT / "docs" / "scheduling.md", "yaml")
UNEQUAL = "jobs: [{name: a, seconds: [1.0, 2.0, 6.0]}, {name: b, seconds: [1.0, 4.0, 5.0], iterations: 3}]"
HARD = "jobs: [" + ", ".join(f"{{name: {j}, seconds: {{1: {s}}}}}" for j, s in enumerate("33222")) + "]"
LATE = "jobs: [{name: a, overrides: [trainer.max_steps=4], arrival_seconds: 2}]"
ONE = "jobs: [{name: a, pieces: [1]}]"


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    return tmp_path / "jobs.yaml"


def printed(jobs: Path, text: str, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, list[str]]:
    """{first cell: the others} of the tables' rows, and the lines around them."""
    jobs.write_text(text)
    cli.main(["schedule", str(jobs), *words])
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    return {cells[0]: cells[1:] for cells in rows} | {line.strip(): [] for line in lines if not line.startswith("│")}


def test_the_pages_gangs(jobs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = printed(jobs, GANGS, capsys, "--policy", "jigsaw")
    gangs = [Gang("measured", (2.0, 3.0), 100), staircase("by depth", 1.0, 2.0, 2, 100)]
    assert read_gangs(jobs) == gangs
    assert rows["complementary"] == rows["exact"] == ["5", "1.000"]
    assert rows["one job after the other"] == rows["rank r on device r"] == ["6", "1.200"]
    ends = ComplementaryPairing().turns(gangs).completion_seconds()
    assert {rows[name][-1] for name in ends} == {f"{seconds:.4g}" for seconds in ends.values()}


def test_unequal_gangs(jobs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {"--plot": tmp_path / "gantt.png", "--chrome": tmp_path / "trace.json"}
    words = [str(word) for pair in files.items() for word in pair]
    rows = printed(jobs, UNEQUAL, capsys, "--policy", "jigsaw", "--devices", "3", *words)
    gangs = [Gang("a", (1.0, 2.0, 6.0)), Gang("b", (1.0, 4.0, 5.0), 3)]
    exact = ordered(ExactGangs().turns(gangs))
    assert rows["exact"][0] == f"{exact.cycle_seconds:.4g}" == "7"
    assert rows["rank r on device r"][0] == f"{Unaware().turns(gangs).cycle_seconds:.4g}" == "11"
    assert {"a", "b"} < set(rows)
    assert files["--plot"].read_bytes().startswith(b"\x89PNG")
    events = json.loads(files["--chrome"].read_text())["traceEvents"]
    assert len(events) == 3 * (1 + 3)
    assert {event["tid"] for event in events} == {"device 0", "device 1", "device 2"}


def test_the_pages_tables(jobs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = printed(jobs, TABLES, capsys, "--policy", "spase", "--devices", "2")
    tables = [Table("a", {1: 8.0, 2: 4.5}), Table("b", {1: 3.0, 2: 2.0}), Table("c", {1: 3.0})]
    assert read_tables(jobs) == tables
    greedy, exact = GreedySpase().plan(tables, 2), ExactSpase().plan(tables, 2)
    assert rows["greedy"][0] == f"{greedy.makespan_seconds:.4g}" == "7.5"
    assert rows["exact"][0] == f"{exact.makespan_seconds:.4g}"
    assert rows["exact"][-1] == "0.0 %"
    assert {rows[job.name][-1] for job in exact.granted} <= {f"{j.start + j.seconds:.4g}" for j in greedy.granted}


def test_the_program_beats_greedy_where_it_can(jobs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chrome = tmp_path / "trace.json"
    rows = printed(jobs, HARD, capsys, "--policy", "spase", "--devices", "2", "--chrome", str(chrome))
    assert rows["greedy"][:2] == ["7", "1.167"]
    assert rows["exact"] == ["6", "1.000", "0.0 %"]
    assert max(event["ts"] + event["dur"] for event in json.loads(chrome.read_text())["traceEvents"]) == 6e6
    assert printed(jobs, HARD, capsys, "--policy", "spase")["greedy"][0] == "12", "one device"


@pytest.mark.parametrize(("text", "policy"), [(GANGS, "jigsaw"), (TABLES, "spase")], ids=["jigsaw", "spase"])
def test_without_a_solver_the_extra_is_named(
    jobs: Path, text: str, policy: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    rows = printed(jobs, text, capsys, "--policy", policy, "--devices", "2")
    assert "exact" not in rows
    assert "no exact plan: it needs scipy: pip install 'lightning-decentral[schedule]'" in rows


def test_a_large_set_is_planned_without_the_program(jobs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    many = "jobs: [" + ", ".join(f"{{name: j{j}, seconds: {list(range(1, 17))}}}" for j in range(16)) + "]"
    rows = printed(jobs, many, capsys, "--policy", "jigsaw")
    assert rows["latin square"] == ["136", "1.000"]
    assert "no exact plan: 4096 choices are more than the 500 that a solver goes through" in rows


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        (GANGS, ["jigsaw,lrtf"], "--policy jigsaw,lrtf: jigsaw and spase are for jobs of several devices at once"),
        (GANGS, ["jigsaw", "--run"], "--run: the jobs have pieces, no trainings behind them: give overrides"),
        (
            GANGS,
            ["jigsaw", "--memory-bytes", "1GB"],
            "--memory-bytes is for jobs of one device at a time: leave it out",
        ),
        (TABLES, ["spase", "--memory-bytes", "1GB"], "--memory-bytes is for jobs of one device at a time"),
        (TABLES, ["spase", "--devices", "0"], "devices must be at least 1, got 0"),
        (
            GANGS,
            ["jigsaw", "--devices", "4"],
            "--devices 4: job measured has 2 pieces, one for each device",
        ),
        (GANGS, ["lrtf"], "jobs with seconds or depths are for --policy jigsaw or spase"),
        (ONE, ["jigsaw"], "job 1: --policy jigsaw needs seconds of a piece for each device, seconds: [2.0, 3.0], or"),
        (TABLES, ["jigsaw"], "job 1: --policy jigsaw needs seconds of a piece for each device"),
        (GANGS, ["spase"], "job 1: --policy spase needs a table of seconds of the whole job by devices"),
        (TABLES, ["spase", "--plot", "no/where.png"], "no/where.png can't be drawn"),
        (TABLES, ["spase", "--chrome", "no/where.json"], "--chrome no/where.json can't be written"),
        ("jobs: [{name: a, seconds: {4: 1}}]", ["spase"], "job a needs 4 devices, but there are 1"),
        ("jobs: [{name: a, seconds: {1: 0}}]", ["spase"], "job a must map 1 or more devices to seconds above 0"),
        ("jobs: [{name: a, seconds: {1: one}}]", ["spase"], "job 1: 1 must be a number, got 'one'"),
        (
            "jobs: [{name: a, seconds: {1: 1}, pieces: 2}]",
            ["spase"],
            "job 1: unknown key 'pieces', known are",
        ),
        ("jobs: [{name: a, seconds: [1, two]}]", ["jigsaw"], "job 1: seconds must be a number, got 'two'"),
        ("jobs: [{name: a, seconds: [-1]}]", ["jigsaw"], "job a must have pieces of 0 or more seconds"),
        ("jobs: [{name: a, depths: [1]}]", ["jigsaw"], "job 1: forward_seconds must be a number, got None"),
        (
            "jobs: [{name: a, depths: [2], forward_seconds: 1, backward_seconds: 1}]",
            ["jigsaw"],
            "job a must have depths from 0 to 1, shares of the model, got 2",
        ),
        (
            "jobs: [{name: a, depths: 2, forward_seconds: 1, backward_seconds: 1}]",
            ["jigsaw"],
            "depths must be a list of numbers, one for each device, got 2",
        ),
        ("jobs: [{name: a, seconds: [1]}, {name: b, seconds: [1, 2]}]", ["jigsaw"], "must have equally many pieces"),
        ("jobs: [{name: a, seconds: [1], iterations: 2000000}]", ["jigsaw"], "2000000 pieces are too many"),
    ],
)
def test_mistakes_are_one_line(jobs: Path, text: str, words: list[str], message: str) -> None:
    jobs.write_text(text)
    with pytest.raises(SystemExit, match=r"^error: [^\n]*$") as error:
        cli.main(["schedule", str(jobs), "--policy", *words])
    assert message in str(error.value)


def test_no_file_is_a_mistake() -> None:
    with pytest.raises(SystemExit, match=r"error: give a file of jobs: lightning-decentral schedule jobs.yaml"):
        cli.main(["schedule", "--policy", "spase"])


def test_a_traces_jobs_are_divided_evenly_among_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile, trace = tmp_path / "m.json", tmp_path / "trace.csv"
    write(Profile(Model("m", "cpu", (BlockCost("b", 1.0, 2.0, 0.0),))), profile)
    header = "job_id,num_gpu,submit_time,iterations,model_name,duration,interval"
    trace.write_text(f"{header}\n0,2,0,10,m,9,9\n1,2,0,10,m,9,9\n2,1,1000,4,m,9,9\n")
    words = ["schedule", "--trace", str(trace), "--profile", str(profile), "--policy", "spase"]
    cli.main([*words, "--devices", "2", "--json"])
    found = json.loads(capsys.readouterr().out)
    # 60 s of work each on one device, 30 on two, and 12 s on one device only: whatever the order, 66 at least.
    assert 66 <= max(turn["finish_seconds"] for turn in found["turns"]) <= 72
    assert any("divided evenly" in remark and "arrivals aren't counted" in remark for remark in found["remarks"])
    with pytest.raises(SystemExit, match="--run: jobs need trainings behind them"):
        cli.main([*words, "--run"])


def test_a_traces_jobs_are_staircases_that_come_and_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = tmp_path / "m.json"
    blocks = (BlockCost("b", forward_seconds=1.0, backward_seconds=2.0, update_seconds=0.0),)
    write(Profile(Model("m", "cpu", blocks)), profile)
    header = "job_id,num_gpu,submit_time,iterations,model_name,duration,interval"
    trace = tmp_path / "trace.csv"
    trace.write_text(f"{header}\n0,2,0,10,m,9,9\n1,2,0,10,m,9,9\n2,1,1000,4,m,9,9\n")
    words = ["schedule", "--trace", str(trace), "--profile", str(profile), "--policy", "jigsaw"]
    cli.main([*words, "--devices", "2", "--json"])
    turns = json.loads(capsys.readouterr().out)["turns"]
    # A pair's cycle is 2 + 3 s; the last job comes when the others have ended, and its piece takes 3 s.
    assert [turn["finish_seconds"] for turn in turns] == [50.0, 50.0, 1012.0]
    assert [turn["start_seconds"] for turn in turns] == [0.0, 0.0, 1000.0]
    with pytest.raises(SystemExit, match="job 0 asked for 2 devices: give --devices 2 or more"):
        cli.main(words)
    with pytest.raises(SystemExit, match="--run: a trace has no trainings behind its jobs"):
        cli.main([*words, "--run"])
