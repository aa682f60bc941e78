"""`lightning-decentral report`: runs whose seconds and bytes are known, in folders as a CSVLogger leaves them."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger

from lightning_decentral.cli import report
from lightning_decentral.gossip import SpeedMonitor
from lightning_decentral.recipes import command as cli
from tests.tiny import QUIET, Quadratic

FAST = {"speed/step_seconds": 0.5, "speed/bytes_per_second": 200.0, "speed/wait_share": 0.25}


def run_folder(
    folder: Path, *losses: float, key: str = "val/loss", file: str = "csv/metrics.csv", slow: float = 1.0
) -> str:
    """A run of ten steps for each loss; speeds from the second ten on, the last ones `slow` times slower."""
    rows: list[dict[str, float | str]] = []
    for number, loss in enumerate(losses):
        step = 10 * number + 9
        rows.append({"step": step, key: loss})
        factor = slow if number == len(losses) - 1 else 1.0
        speed = {**FAST, "speed/step_seconds": 0.5 * factor, "speed/bytes_per_second": 200.0 / factor}
        rows += [{"step": step, **speed}] if number else []
    rows.append({"step": 10 * len(losses), "test/loss": 0.0})
    path = folder / file
    path.parent.mkdir(parents=True)
    with path.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, sorted({name for row in rows for name in row}))
        writer.writeheader()
        writer.writerows(rows)
    return str(folder)


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    cli.main(["report", *words, "--json"])
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_steps_seconds_and_bytes_of_runs_and_to_the_loss_that_all_reached(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = (
        run_folder(tmp_path / "ddp", 3.0, 2.0, 2.5),
        run_folder(tmp_path / "gossip", 2.0, 1.0, file="report.csv", slow=3.0),
    )
    found = answer(capsys, *runs)
    assert (found["loss"], found["target"]) == ("val/loss", 2.0)
    whole = {"step_seconds": 0.5, "seconds": 15.0, "sent_bytes": 3000.0, "wait_share": 0.25}
    ddp = {"name": "ddp", "loss": 2.0, "steps": 30, **whole}
    # The first ten steps weren't measured: they are taken to be as fast as the next.
    gossip = {
        "name": "gossip",
        "loss": 1.0,
        "steps": 20,
        **whole,
        "step_seconds": 1.5,
        "seconds": 30.0,
        "sent_bytes": 2000.0,
    }
    assert found["runs"] == [
        {**ddp, "target_steps": 20, "target_seconds": 10.0, "target_bytes": 2000.0},
        {**gossip, "target_steps": 10, "target_seconds": 15.0, "target_bytes": 1000.0},
    ]
    assert not list(tmp_path.glob("*.png")), "nothing is written unasked"
    cli.main(["report", *runs, "--plot", "own.png"])
    assert (tmp_path / "own.png").stat().st_size > 10_000
    cli.main(["report", *runs, "--plot", "own.svg"])
    text = capsys.readouterr().out
    assert "until val/loss was 2, which all of them reached:" in text
    assert "picture: own.svg" in text
    drawn = (tmp_path / "own.svg").read_text()
    assert all(f"<!-- {label} -->" in drawn for label in ("ddp", "gossip", *report.AXES))


def test_the_key_is_one_that_all_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = run_folder(tmp_path / "a" / "run", 3.0, 2.0, key="mine"), run_folder(tmp_path / "b" / "run", 3.0, key="mine")
    with pytest.raises(SystemExit, match="name a key with --loss; all of them logged nothing"):
        cli.main(["report", *runs])
    found = answer(capsys, *runs, "--loss", "mine")
    assert [run["name"] for run in found["runs"]] == [*runs]  # type: ignore[attr-defined]  # whose last words are alike


def test_a_run_that_is_too_short_has_steps_and_the_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = run_folder(tmp_path / "short", 3.0)
    cli.main(["report", short, run_folder(tmp_path / "long", 3.0, float("nan"), 2.0)])
    assert "no seconds of short: the callback SpeedMonitor" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("made", "named", "printed"),
    [
        ((), "a", "there is no .*a: name the folder of a run with a CSVLogger"),
        (("a/x",), "a/y", "there is no .*y: name"),
        (("a/x", "a/y"), "a", "a holds several runs: name one of .*x/csv, .*y/csv"),
    ],
)
def test_what_holds_no_run_or_several_is_one_line(
    made: Sequence[str], named: str, printed: str, tmp_path: Path
) -> None:
    for folder in made:
        run_folder(tmp_path / folder, 1.0)
    with pytest.raises(SystemExit, match=printed):
        cli.main(["report", str(tmp_path / named)])
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match=r"there is no metrics\.csv or report\.csv in"):
        cli.main(["report", str(tmp_path / "empty")])
    with pytest.raises(SystemExit, match="was never a finite number"):
        cli.main(["report", run_folder(tmp_path / "diverged", float("nan"))])


def test_a_resumed_run_is_read_from_both_of_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_folder(tmp_path, 3.0, 2.5, 2.0, file="csv/version_0/metrics.csv")
    later = tmp_path / "csv/version_1/metrics.csv"
    later.parent.mkdir()
    # It went on from step 20: the file of the killed run has a row that was trained again.
    later.write_text("step,val/loss,speed/step_seconds,speed/bytes_per_second\n29,1.0,2.0,10\n39,0.5,2.0,10\n")
    (run,) = answer(capsys, str(tmp_path))["runs"]  # type: ignore[misc]
    assert (run["steps"], run["loss"], run["seconds"]) == (40, 0.5, 0.5 * 20 + 2.0 * 20)  # type: ignore[index]


def test_a_run_that_logged_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,val/loss\n")
    with pytest.raises(SystemExit, match=r"metrics\.csv has no rows with a step"):
        cli.main(["report", str(tmp_path)])


def test_what_a_training_of_ones_own_logs_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {**QUIET, "devices": 1, "max_steps": 30, "logger": CSVLogger(tmp_path, name=None), "log_every_n_steps": 1}

    class Logged(Quadratic):
        def training_step(self, batch: object, batch_idx: int) -> object:  # type: ignore[override]
            loss = super().training_step(batch, batch_idx)
            self.log("train_loss", loss)
            return loss

    Trainer(**options, callbacks=[SpeedMonitor(every_n_steps=5)]).fit(Logged())
    found = answer(capsys, str(tmp_path))
    (one,) = found["runs"]  # type: ignore[misc]
    assert (found["loss"], one["steps"]) == ("train_loss", 30)
    assert 0 < one["seconds"] < 60
