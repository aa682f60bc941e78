"""What a run came to: every number of the report against one computed apart from it."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_decentral  # noqa: F401  # registers the names
from lightning_decentral.gossip import ConsensusMonitor, Report, WorkerLossMonitor
from lightning_decentral.shared.plan import figure
from lightning_decentral.shared.plan.units import shown_bytes
from tests.gossiping import Scripted
from tests.tiny import QUIET, Record, in_processes, recorded

SIZE, STEPS = 2, 12


class Plane(LightningDataModule):
    """y = x (1, -2, 3) + 1 with noise; 12 test examples in batches of 5, so the last one is smaller."""

    def setup(self, stage: str) -> None:
        x = torch.randn(92, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        noise = torch.randn(92, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        y = x @ torch.tensor([[1.0], [-2.0], [3.0]], dtype=torch.float64) + 1 + noise
        self.train, self.held_out = TensorDataset(x[:80], y[:80]), TensorDataset(x[80:], y[80:])

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train, batch_size=4)

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.held_out, batch_size=5)


class Line(LightningModule):
    """Least squares behind a dropout that training only must see."""

    score_name = "error"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.frozen = nn.Dropout(0.5)
        self.line = nn.Linear(3, 1, dtype=torch.float64)

    def score(self, batch: Any) -> Tensor:
        x, y = batch
        return (self.line(self.frozen(x)) - y).square().squeeze(1)

    def on_train_start(self) -> None:
        self.frozen.eval()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.score(batch).mean()
        self.log("train/loss", loss)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test/error", self.score(batch).mean(), batch_size=len(batch[0]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02)


class Unscored(Line):
    """Offers no name for its score, so it has none."""

    score_name = property()  # type: ignore[assignment]


def error(parameters: Tensor) -> float:
    """Mean squared error over the 12 test examples of weights [3] and bias [1]."""
    data = Plane()
    data.setup("test")
    x, y = data.held_out.tensors
    return float((x @ parameters[:3] + parameters[3] - y.squeeze(1)).square().mean())


def flat(module: Line) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def run(folder: Path, strategy: Any, module: Line, **options: Any) -> Trainer:
    """Fit and test; the report is under folder/report."""
    watched = [Record(folder), ConsensusMonitor(every_n_steps=2), WorkerLossMonitor(every_n_steps=2)]
    saved = ModelCheckpoint(dirpath=folder / "checkpoints", filename="kept")
    settings = {**QUIET, "enable_checkpointing": True, "log_every_n_steps": 1, "max_steps": STEPS, **options}
    callbacks = [*watched, saved, Report(directory=str(folder / "report"))]
    trainer = Trainer(strategy=strategy, callbacks=callbacks, **settings)
    trainer.fit(module, datamodule=Plane())
    trainer.test(module, datamodule=Plane(), verbose=False)
    return trainer


def outcome(folder: Path) -> Any:
    return json.loads((folder / "report" / "report.json").read_text())


def test_own_score_traffic_and_distance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = Line()
    run(tmp_path, Scripted(), module)
    result = outcome(tmp_path)
    (worker,) = result["workers"]
    assert worker["score"] == pytest.approx(error(flat(module)), rel=1e-12)
    assert (worker["bytes_sent"], worker["seconds_waited"]) == (100 * STEPS, STEPS**2)
    assert (result["consensus_distance"], result["consensus_distance_relative"]) == (STEPS / 10, STEPS / 1000)
    shown = capsys.readouterr().out
    for text in (
        f"{error(flat(module)):.4f}",
        "1.2 kB",
        "144.00 s",
        "1.2 from consensus",
        "1.2 %",
        "kept.ckpt",
        "report.csv",
        "report.png",
    ):
        assert text in shown


def test_scoring_leaves_every_part_in_its_mode(tmp_path: Path) -> None:
    module, modes = Line(), []
    module.on_train_end = lambda: modes.append((module.training, module.frozen.training, module.line.training))  # type: ignore[method-assign]
    run(tmp_path, Scripted(), module)
    assert modes == [(True, False, True)]


def test_the_csv_holds_what_was_logged_one_row_per_step(tmp_path: Path) -> None:
    run(tmp_path, Scripted(), Line())
    rows = list(csv.DictReader((tmp_path / "report" / "report.csv").open()))
    assert [int(row["step"]) for row in rows] == list(range(STEPS))
    distances = {int(r["step"]): float(r["gossip/consensus_distance"]) for r in rows if r["gossip/consensus_distance"]}
    assert distances == {step - 1: step / 10 for step in range(2, STEPS + 1, 2)}
    train = [float(row["train/loss"]) for row in rows]
    worker = [float(row["worker/0/loss"]) for row in rows if row["worker/0/loss"]]
    assert worker == pytest.approx([(train[i] + train[i + 1]) / 2 for i in range(0, STEPS, 2)], rel=1e-5)


def test_a_module_without_score_is_reported_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, Scripted(), Unscored())
    assert outcome(tmp_path)["workers"][0]["score"] is None
    assert "worker 0's own model" in capsys.readouterr().out


def test_under_another_strategy_only_what_was_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = Line()
    run(tmp_path, "auto", module)
    assert outcome(tmp_path) == {}
    shown = capsys.readouterr().out
    assert f"{error(flat(module)):.4f}" in shown
    assert "worker" not in shown
    assert (tmp_path / "report" / "report.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_one_line_names_the_extra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run(tmp_path, Scripted(), Line())
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "not installed" in line]
    assert "matplotlib" in line
    assert "pip install 'lightning-decentral[plot]'" in line
    assert (tmp_path / "report" / "report.csv").exists()
    assert not (tmp_path / "report" / "report.png").exists()


def test_two_workers(tmp_path: Path) -> None:
    in_processes(run_forked, tmp_path)
    own = recorded(tmp_path, SIZE)[-1]
    result = outcome(tmp_path)
    assert [worker["score"] for worker in result["workers"]] == pytest.approx([error(x) for x in own], rel=1e-12)
    apart = (own - own.mean(dim=0)).square().sum(dim=1).mean().sqrt()
    assert result["consensus_distance"] == pytest.approx(float(apart))
    assert result["consensus_distance_relative"] == pytest.approx(float(apart / own.mean(dim=0).norm()))
    sent = [worker["bytes_sent"] for worker in result["workers"]]
    assert sent[0] == sent[1] >= STEPS * 4 * 8
    shown = (tmp_path / "shown.txt").read_text()
    (mean,) = [line for line in shown.splitlines() if "the mean of the workers" in line]
    assert f"{error(own.mean(dim=0)):.4f}" in mean
    assert f"{shown_bytes(sum(sent))} in all" in mean
    for rank in range(SIZE):
        (line,) = [line for line in shown.splitlines() if f"worker {rank}'s own model" in line]
        assert f"{error(own[rank]):.4f}" in line


def run_forked(folder: Path) -> None:
    """Fit and test of two workers, what they print kept in folder/shown.txt."""
    import contextlib

    with (folder / "shown.txt").open("w") as file, contextlib.redirect_stdout(file):
        run(folder, "gossip_fork", Line(), devices=SIZE)


# ---- the picture ------------------------------------------------------------------------------------------------

LOGGED = [
    {"step": 0, "worker/0/loss": 4.0, "worker/1/loss": 2.0, "worker/10/loss": 6.0},
    {"step": 5, "worker/0/loss": 3.0, "worker/1/loss": 1.0, figure.DISTANCE: 0.5},
    {"step": 9, "worker/0/loss": 1.0, "worker/1/loss": 0.0, "worker/10/loss": 2.0, "val/loss": 7.0},
]


def test_curves_are_read_from_the_rows() -> None:
    workers = figure.worker_keys(LOGGED)
    assert workers == ["worker/0/loss", "worker/1/loss", "worker/10/loss"]
    assert figure.curve(LOGGED, "worker/10/loss") == ([0, 9], [6.0, 2.0])
    assert figure.mean_curve(LOGGED, workers) == ([0, 9], [4.0, 1.0])
    assert figure.first_curve(LOGGED, figure.VALIDATION_LOSSES) == ([9], [7.0])
    assert figure.first_curve(LOGGED, figure.LOSSES) == ([], [])


@pytest.mark.sampled
@pytest.mark.parametrize("rows", [LOGGED, LOGGED[:1], []], ids=["all", "no distance", "nothing"])
def test_any_rows_can_be_drawn(tmp_path: Path, rows: list[dict[str, float]]) -> None:
    figure.draw(rows, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
