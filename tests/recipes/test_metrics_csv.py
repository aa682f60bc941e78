"""One file of a run, whoever of its workers logs."""

import csv
from pathlib import Path

import pytest

from lightning_decentral.recipes.metrics_csv import MetricsCSV


def logger(folder: Path) -> MetricsCSV:
    return MetricsCSV(folder, name="csv", version="")


def test_the_next_worker_goes_on_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = logger(tmp_path)
    first.log_hyperparams({"seed": 3})
    first.log_metrics({"loss": 0.5}, step=1)
    first.save()
    monkeypatch.setenv("LOCAL_RANK", "4")
    later = logger(tmp_path)
    later.log_metrics({"accuracy": 0.75}, step=2)
    later.save()
    rows = list(csv.DictReader((tmp_path / "csv" / "metrics.csv").open()))
    assert rows == [
        {"accuracy": "", "loss": "0.5", "step": "1"},
        {"accuracy": "0.75", "loss": "", "step": "2"},
    ]
    assert "seed: 3" in (tmp_path / "csv" / "hparams.yaml").read_text()
