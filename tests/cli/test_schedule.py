"""`lightning-decentral schedule`: tables, files and mistakes, against the library's own numbers."""

import json
from pathlib import Path

import pytest

from lightning_decentral.recipes import command as cli
from lightning_decentral.shared.plan.profile import BlockCost, Model, Profile, write
from lightning_decentral.sweep.plan import policy
from lightning_decentral.sweep.plan.policy import POLICIES

JOBS = """
jobs:
  - {name: long, pieces: [0.02], repeat: 3}
  - {name: short, pieces: [{compute_seconds: 0.01, load_seconds: 0.005}], repeat: 2}
"""

TRAININGS = {
    "TRAININGS": "jobs: [{name: m, overrides: [trainer.max_steps=4]}]",
    "MIXED": "jobs: [{name: m, overrides: [trainer.max_steps=4]}, {name: n, pieces: [1]}]",
    "WRONG": "jobs: [{name: m, overrides: [trainer.max_steps=4, optimizer.lrr=1]}]",
    "WIDE": "jobs: [{name: m, overrides: [trainer.max_steps=4, trainer.devices=2]}]",
}


@pytest.fixture
def jobs(tmp_path: Path) -> str:
    (tmp_path / "jobs.yaml").write_text(JOBS)
    write(Profile(Model("m", "cpu", (BlockCost("b", 0.5, 1.0, 0.0, 8),))), tmp_path / "m.json")
    header = "job_id,num_gpu,submit_time,iterations,model_name,duration,interval"
    (tmp_path / "trace.csv").write_text(f"{header}\n0,1,0,4,vgg,9,9\n1,2,3,4,vgg,9,9\n")
    return str(tmp_path / "jobs.yaml")


def test_every_policy_has_a_name() -> None:
    classes = {c for c in vars(policy).values() if isinstance(c, type) and issubclass(c, policy.Policy)}
    # ASHA compares scores, which jobs of a table don't have.
    assert {type(p) for p in POLICIES.values()} == classes - {policy.Policy, policy.ASHA}


def test_tables_chart_and_trace(jobs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot, chrome = tmp_path / "s.png", tmp_path / "s.json"
    files = ["--plot", str(plot), "--chrome", str(chrome)]
    cli.main(["schedule", jobs, "--policy", "srtf,lrtf", "--devices", "1", *files])
    printed = capsys.readouterr().out
    assert "no makespan is under 0.08 s" in printed
    assert all(f" {name} " in printed for name in ("srtf", "lrtf"))
    assert "fifo" not in printed
    assert plot.read_bytes().startswith(b"\x89PNG")
    events = json.loads(chrome.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {"simulated"}
    assert {event["name"] for event in events} >= {"long 2", "short 1", "load short 0"}


def test_a_public_trace_says_what_is_synthesised(jobs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--trace", str(tmp_path / "trace.csv"), "--profile", f"vgg={tmp_path / 'm.json'}", "--devices", "2"]
    cli.main(["schedule", *words])
    printed = " ".join(capsys.readouterr().out.split())
    assert "synthesised from the profiles" in printed
    assert "1 of 2 jobs asked for several devices" in printed
    assert "no makespan is under 15 s" in printed  # arrives at 3, 2 devices x 4 steps of 1.5 s
    cli.main(["schedule", *words, "--first", "1"])
    assert "1 jobs, 2 devices: no makespan is under 6 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["JOBS", "--policy", "coffee"], "use one of complementary, fifo, lrtf, round_robin, srtf, jigsaw, spase"),
        (["JOBS", "--devices", "0"], "devices must be at least 1, got 0"),
        (["JOBS", "--run"], "--run: job long has pieces and no training behind them: give it overrides"),
        (["JOBS", "--plot", "no/where.png"], "no/where.png can't be drawn"),
        (["JOBS", "--chrome", "no/where.json"], "--chrome no/where.json can't be written"),
        (["JOBS", "--trace", "t.csv"], "either a file of jobs or --trace"),
        ([], "either a file of jobs or --trace"),
        (["none.yaml"], "none.yaml can't be read"),
        (["TRAININGS", "--run", "--memory-bytes", "1GB"], "--run keeps all trainings in memory at once"),
        (
            ["MIXED", "--run"],
            "--run: job n has pieces and no training behind them: give it overrides",
        ),
        (["TRAININGS", "--devices", "99"], "99 training devices need as many "),
        (["TRAININGS", "--measured", "5"], "measured must be more than 5 steps, which are slower than others, got 5"),
        (["WRONG"], "job m: no 'lrr' in optimizer"),
        (["WIDE"], "job m trains on 2 devices, but a piece runs on one: use trainer.devices=1"),
        (["--trace", "t.csv", "--layout", "philly"], "no layout 'philly': use one of tiresias, gavel"),
    ],
)
def test_mistakes_are_one_line(jobs: str, words: list[str], message: str) -> None:
    files = {"JOBS": jobs, **{name: str(Path(jobs).with_name(f"{name}.yaml")) for name in TRAININGS}}
    for name, text in TRAININGS.items():
        Path(files[name]).write_text(text)
    with pytest.raises(SystemExit, match=r"^error: [^\n]*$") as error:
        cli.main(["schedule", *(files.get(word, word) for word in words)])
    assert message in str(error.value)


def test_profiles_of_trainings_need_no_process(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(jobs).write_text(
        "jobs: [{name: m, profile: m.json, overrides: [trainer.max_steps=4]}, {name: n, pieces: [1]}]"
    )
    cli.main(["schedule", jobs])
    assert "2 jobs, 1 device: no makespan is under 7 s" in capsys.readouterr().out  # 4 steps of 1.5 s
