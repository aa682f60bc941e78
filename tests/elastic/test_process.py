"""Whoever logs next goes on in the run and the files of the one before."""

import csv
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter

from lightning_decentral.elastic import process as logs
from lightning_decentral.elastic.process import began, go_on, take_over


def trainer(*loggers: Logger) -> Any:
    return SimpleNamespace(loggers=list(loggers))


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Trainers that said their hyperparameters."""
    found: list[Any] = []
    monkeypatch.setattr(logs, "_log_hyperparams", found.append)
    return found


def test_rows_of_the_lost_one_stay_in_one_file(tmp_path: Path, said: list[Any]) -> None:
    first, second = CSVLogger(tmp_path), CSVLogger(tmp_path)
    versions = began(trainer(first))
    first.log_metrics({"loss": 1.0, "early": 5.0}, 1)
    first.save()
    file = Path(first.log_dir) / ExperimentWriter.NAME_METRICS_FILE
    file.write_text(file.read_text() + "3.0,2.")  # it was killed while it wrote
    go_on([second], versions)
    assert second.log_dir == first.log_dir
    of_second = trainer(second)
    take_over(of_second)
    second.log_metrics({"loss": 2.0, "late": 6.0}, 2)
    second.save()
    rows = [{name: float(x) for name, x in row.items() if x} for row in csv.DictReader(file.open())]
    assert rows == [{"loss": 1.0, "early": 5.0, "step": 1}, {"loss": 2.0, "late": 6.0, "step": 2}]
    assert said == [of_second]
    assert [path.name for path in (tmp_path / "lightning_logs").iterdir()] == ["version_0"]


def test_a_run_of_weights_and_biases_is_resumed(tmp_path: Path) -> None:
    logger = WandbLogger(project="t", save_dir=tmp_path, offline=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        go_on([logger], ["abc123"])
    assert logger.version == "abc123"
    assert {name: logger._wandb_init[name] for name in ("id", "resume")} == {"id": "abc123", "resume": "allow"}


def test_a_logger_whose_version_cannot_be_given_is_named() -> None:
    class Own(Logger):
        name, version = "own", "mine"

        def log_metrics(self, metrics: Any, step: Any = None) -> None: ...

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    with pytest.warns(UserWarning, match="Own can't continue the oldest worker's run 'theirs'"):
        go_on([Own()], ["theirs"])
