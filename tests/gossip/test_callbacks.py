"""What users watch: of a strategy whose numbers are known, and of two gossiping workers against their own records."""

import csv
import io
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import wandb
import yaml
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import BatchEncoding

from lightning_decentral import GossipStrategy
from lightning_decentral.gossip import (
    Auto,
    CommunicationMonitor,
    ConsensusControl,
    ConsensusMonitor,
    DifferenceCompression,
    Gossip,
    Int8,
    MixingMonitor,
    SpeedMonitor,
    StartSummary,
    WorkerLossMonitor,
)
from lightning_decentral.gossip import callbacks as watchers
from lightning_decentral.gossip import speed as watched
from lightning_decentral.gossip.plan.weights import mixing_matrix
from lightning_decentral.gossip.wire.exchange import Traffic
from lightning_decentral.shared import Rows, WandbPerWorker
from lightning_decentral.shared.compute.codec.blocks import dither, key
from tests.gossiping import Scripted
from tests.tiny import QUIET, Quadratic, Record, in_processes, recorded
from tests.wandb_file import history, run, settings

SIZE, STEPS, DIM = 2, 24, 5
Array = np.ndarray[Any, Any]


class Remembering(Quadratic):
    """Keeps the loss of every batch, and writes them to `folder/loss-rank.pt` if it has a folder."""

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__(dim=DIM)
        self.folder = folder
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.item())
        return loss

    def on_train_end(self) -> None:
        if self.folder:
            torch.save(self.losses, self.folder / f"loss-{self.global_rank}.pt")


def fit(
    tmp_path: Path, *callbacks: Callback, strategy: Any = None, **options: Any
) -> tuple[Trainer, Remembering, dict[int, Any]]:
    """Trainer, module and logged rows by step of 12 updates with one worker."""
    rows, module = Rows(tmp_path), Remembering()
    settings = {**QUIET, "max_steps": 12, "logger": rows, "log_every_n_steps": 10**6, **options}
    trainer = Trainer(strategy=strategy or Scripted(), callbacks=list(callbacks), **settings)
    trainer.fit(module)
    return trainer, module, {int(row["step"]): row for row in rows.rows}


@pytest.mark.parametrize("every", [1, 4, 5])
def test_consensus_is_measured_at_multiples_and_logged_there(tmp_path: Path, every: int) -> None:
    trainer, _, rows = fit(tmp_path, ConsensusMonitor(every_n_steps=every))
    expected = list(range(every, 13, every))
    assert trainer.strategy.asked == expected
    assert {s: r["gossip/consensus_distance"] for s, r in rows.items()} == {r - 1: r / 10 for r in expected}
    assert {s: r["gossip/consensus_distance_relative"] for s, r in rows.items()} == {r - 1: r / 1000 for r in expected}


def test_a_short_run_has_a_curve_of_the_consensus_and_a_long_one_pays_for_few(tmp_path: Path) -> None:
    trainer, _, _ = fit(tmp_path, ConsensusMonitor(), max_steps=320)
    assert trainer.strategy.asked == [*range(10, 201, 10), 250, 300]


class Clocked(Quadratic):
    """Batches of 2 x 3 tokens; set-up takes 100 s, each batch 2 s and a validation 1000 s."""

    now = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.now += 2.0 + 100.0 * (self.global_step == 0)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.now += 1000.0

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.zeros(400, 3, dtype=torch.long)), batch_size=2)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.zeros(1, 3)))


@pytest.mark.parametrize("gossips", [True, False])
def test_speed_is_of_whole_windows_without_set_up_and_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gossips: bool
) -> None:
    module, rows = Clocked(), Rows(tmp_path)
    monkeypatch.setattr(watched, "perf_counter", lambda: module.now)
    settings = {**QUIET, "max_steps": 12, "logger": rows, "log_every_n_steps": 10**6, "val_check_interval": 6}
    strategy: Any = Scripted() if gossips else "auto"
    options = {**settings, "devices": 1, "num_sanity_val_steps": 1, "strategy": strategy}
    Trainer(**options, callbacks=[SpeedMonitor(every_n_steps=4)]).fit(module)
    found = [
        {key: row[key] for key in row if key.startswith("speed/")} for row in rows.rows if "speed/step_seconds" in row
    ]
    speed = {"speed/step_seconds": 2.0, "speed/samples_per_second": 1.0, "speed/tokens_per_second": 3.0}
    waited = [(64 - 16) / 8, (144 - 64) / 8]
    counted = [{"speed/wait_share": share, "speed/bytes_per_second": 50.0} for share in waited]
    assert found == [{**speed, **(row if gossips else {})} for row in counted]


def test_ddp_sends_what_a_rings_all_reduce_of_gradients_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DDPStrategy, "world_size", 4)
    trainer: Any = SimpleNamespace(strategy=DDPStrategy(), lightning_module=Quadratic(dim=5))
    assert watched._counted(trainer, 3) == {"sent": 2 * 3 / 4 * 5 * 8 * 3}


@dataclass
class Texts:
    name: str
    ids: Tensor


BATCHES: dict[str, Any] = {
    "mapping": UserDict({"length": torch.tensor(3), "ids": torch.zeros(2, 3, dtype=torch.long)}),
    "Hugging Face's": BatchEncoding({"ids": torch.zeros(2, 3, dtype=torch.long), "mask": torch.zeros(2, 3)}),
    "dataclass": [Texts("one", torch.zeros(2, 3, dtype=torch.long)), torch.zeros(4)],
    "numbers": {"pixels": torch.zeros(2, 3)},
    "nothing": {"name": "one", "length": torch.tensor(3)},
}
SAMPLES = {"numbers": (2, 0), "nothing": (0, 0)}


@pytest.mark.parametrize("name", BATCHES)
def test_samples_and_tokens_are_those_of_a_batchs_first_tensor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monitor, trainer, module = SpeedMonitor(), Trainer(**QUIET), Quadratic()
    monitor.on_train_start(trainer, module)
    monitor.on_train_batch_end(trainer, module, None, BATCHES[name], 0)
    assert (monitor._samples, monitor._tokens) == SAMPLES.get(name, (2, 6))


class Two(Clocked):
    """Two optimizers that both step on every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]


@pytest.mark.parametrize(("kind", "accumulated"), [(Clocked, 1), (Clocked, 2), (Two, 1)])
def test_a_step_is_one_for_all_its_optimizers_and_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Clocked], accumulated: int
) -> None:
    module, rows = kind(), Rows(tmp_path)
    monkeypatch.setattr(watched, "perf_counter", lambda: module.now)
    monkeypatch.setattr(watched, "_counted", lambda _, steps: {"sent": 100.0 * steps})
    options = {**QUIET, "logger": rows, "log_every_n_steps": 10**6, "devices": 1, "limit_train_batches": 12}
    options |= {"max_epochs": 1, "accumulate_grad_batches": accumulated, "limit_val_batches": 0}
    Trainer(**options, callbacks=[SpeedMonitor(every_n_steps=3)]).fit(module)
    speeds = [
        (row["speed/step_seconds"], row["speed/bytes_per_second"]) for row in rows.rows if "speed/step_seconds" in row
    ]
    assert speeds == [(2.0 * accumulated, 50.0 / accumulated)] * (4 // accumulated - 1)


def test_accumulated_batches_are_no_steps(tmp_path: Path) -> None:
    trainer, _, _ = fit(tmp_path, ConsensusMonitor(every_n_steps=3), accumulate_grad_batches=4)
    assert trainer.strategy.asked == [3, 6, 9, 12]


def test_waiting_is_per_step_since_the_last_row_and_bytes_are_cumulative(tmp_path: Path) -> None:
    _, _, rows = fit(tmp_path, CommunicationMonitor(every_n_steps=4))
    assert {s: r["gossip/wait_seconds"] for s, r in rows.items()} == {
        3: 16 / 4,
        7: (64 - 16) / 4,
        11: (144 - 64) / 4,
    }
    assert [r["gossip/in_flight_seconds"] for r in rows.values()] == [3, 3, 3]
    assert [r["gossip/bytes_sent"] for r in rows.values()] == [400, 800, 1200]
    assert [r["gossip/refused_messages"] for r in rows.values()] == [1, 2, 3]


def test_how_a_worker_mixes_is_logged_by_name(tmp_path: Path) -> None:
    trainer, _, rows = fit(tmp_path, MixingMonitor(every_n_steps=4))
    assert {s: r["gossip/mixing_rate"] for s, r in rows.items()} == {3: 1 / 5, 7: 1 / 9, 11: 1 / 13}
    assert [r["gossip/delay"] for r in rows.values()] == [2, 2, 2]
    assert trainer.callback_metrics["gossip/mixing_rate"] == pytest.approx(1 / 13)
    assert "gossip/mixing_rate" not in trainer.progress_bar_metrics


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_workers_loss_is_the_mean_over_its_batches_since_the_last_row(tmp_path: Path, accumulate: int) -> None:
    _, module, rows = fit(tmp_path, WorkerLossMonitor(every_n_steps=5), accumulate_grad_batches=accumulate)
    batches = 5 * accumulate
    chunks = [module.losses[:batches], module.losses[batches : 2 * batches]]
    assert {s: r["worker/0/loss"] for s, r in rows.items()} == pytest.approx(
        {4: sum(chunks[0]) / batches, 9: sum(chunks[1]) / batches}, rel=1e-12
    )


class Late:
    """A number of a device that has more to do: whoever reads it waits."""

    on_host = False
    waiting: ClassVar[list["Late"]] = []

    def __init__(self, value: Tensor) -> None:
        assert all(late.read_at is not None for late in self.waiting[:-1]), "only the last one is under way"
        self._value, self.read_at = value, None
        self.waiting.append(self)

    def read(self) -> Tensor:
        self.read_at = len(self.waiting)
        return self._value


def test_a_workers_loss_on_a_device_is_read_when_the_next_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchers, "AsyncRead", Late)
    monkeypatch.setattr(Late, "waiting", [])
    _, module, rows = fit(tmp_path, WorkerLossMonitor(every_n_steps=2))
    losses = {s: sum(module.losses[s - 1 : s + 1]) / 2 for s in rows}
    assert {s: r["worker/0/loss"] for s, r in rows.items()} == pytest.approx(losses, rel=1e-12)
    assert len(rows) == len(Late.waiting) > 3
    # Each when its successor is about to be measured; the last one when training ends.
    assert [late.read_at for late in Late.waiting] == [*range(1, len(rows)), len(rows)]


def test_the_bar_shows_the_share_of_waiting_and_callbacks_may_monitor_all(tmp_path: Path) -> None:
    every: dict[str, Any] = {"every_n_steps": 3}
    trainer, _, _ = fit(tmp_path, ConsensusMonitor(**every), CommunicationMonitor(**every), MixingMonitor(**every))
    shown = {key for key in trainer.progress_bar_metrics if key != "v_num"}
    assert shown == {"waiting"}
    assert trainer.progress_bar_metrics["waiting"] == 1.0  # of seconds that this strategy only counts
    assert float(trainer.callback_metrics["gossip/consensus_distance_relative"]) == pytest.approx(0.012)


class WaitsOnce(Scripted):
    """Waits in its second and third update alone."""

    def traffic(self) -> Traffic:
        return replace(super().traffic(), wait_seconds=10.0 * min(2, max(0, self.updates - 1)))


class Bar(Callback):
    def __init__(self) -> None:
        self.shown: list[float | None] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.shown.append(trainer.progress_bar_metrics.get("waiting"))


def test_waiting_is_shown_from_when_there_was_some_and_falls_back_to_0(tmp_path: Path) -> None:
    bar = Bar()
    fit(tmp_path, CommunicationMonitor(every_n_steps=1), bar, strategy=WaitsOnce(), max_steps=5)
    assert bar.shown == [None, 1.0, 1.0, 0.0, 0.0]


def test_the_summary_is_printed_and_kept_with_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, StartSummary(), logger=CSVLogger(tmp_path, name=None, version=""))
    assert "scripted" in capsys.readouterr().out
    kept = yaml.safe_load((tmp_path / "hparams.yaml").read_text())
    assert kept == {"gossip/workers": 1, "gossip/topology": "scripted"}


class Settings(Rows):
    """Keeps the first hyperparameters that it's given, as TensorBoard's table does."""

    first: dict[str, Any] | None = None

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.first = dict(params) if self.first is None else self.first


class Configured(Quadratic):
    def __init__(self, width: int = 3) -> None:
        super().__init__(dim=DIM)
        self.save_hyperparameters()


def test_the_settings_come_with_the_modules_own_hyperparameters(tmp_path: Path) -> None:
    rows = Settings(tmp_path)
    options: dict[str, Any] = {**QUIET, "max_steps": 1, "logger": rows, "strategy": Scripted()}
    Trainer(**options, callbacks=[StartSummary()]).fit(Configured())
    assert rows.first == {"width": 3, "gossip/workers": 1, "gossip/topology": "scripted"}


def test_under_another_strategy_nothing_is_logged_or_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    every = [
        ConsensusMonitor(every_n_steps=1),
        CommunicationMonitor(every_n_steps=1),
        MixingMonitor(every_n_steps=1),
        WorkerLossMonitor(every_n_steps=1),
    ]
    _, _, rows = fit(tmp_path, *every, StartSummary(), strategy="auto")
    assert rows == {}
    assert "topology" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "monitor", [ConsensusMonitor, CommunicationMonitor, MixingMonitor, SpeedMonitor, WorkerLossMonitor]
)
def test_measuring_every_0_steps_is_refused(monitor: Callable[..., Callback]) -> None:
    with pytest.raises(ValueError, match="every_n_steps must be at least 1, got 0"):
        monitor(every_n_steps=0)


@pytest.mark.parametrize("outputs", [None, {}, {"other": 1}])
def test_a_training_step_without_loss_is_no_error(outputs: Any) -> None:
    monitor, trainer, module = WorkerLossMonitor(), Trainer(**QUIET), Quadratic()
    monitor.on_train_start(trainer, module)
    monitor.on_train_batch_end(trainer, module, outputs, None, 0)
    assert monitor._losses == []


# ---- two gossiping workers --------------------------------------------------------------------------------------


def csv_logger(folder: Path) -> Logger:
    return CSVLogger(folder, name=None, version="")


def wandb_logger(folder: Path) -> Logger:
    logger = WandbLogger(save_dir=folder, offline=True, project="one-run")
    logger.log_hyperparams({"recipe": "tiny"})  # begins the run here, before the workers start
    return logger


def wandb_per_worker(folder: Path) -> Logger:
    logger = WandbPerWorker(save_dir=str(folder), offline=True, project="runs", group="together")
    logger.log_hyperparams({"recipe": "tiny"})
    return logger


def train(folder: Path, make_logger: Callable[[Path], Logger]) -> None:
    """A fit of two forked workers, watched every 4 steps; each records its parameters and losses by itself."""
    watched: list[Callback] = [Record(folder), StartSummary()]
    kinds = (ConsensusMonitor, CommunicationMonitor, MixingMonitor, WorkerLossMonitor)
    watched += [kind(every_n_steps=4) for kind in kinds]
    options = {**QUIET, "logger": make_logger(folder), "max_steps": STEPS, "devices": SIZE}
    Trainer(strategy="gossip_fork", callbacks=watched, **options).fit(Remembering(folder))
    wandb.finish()


def worker_losses(folder: Path, rank: int) -> dict[int, float]:
    """step -> mean of the last 4 losses, from the worker's own record."""
    losses = torch.load(folder / f"loss-{rank}.pt")
    return {end - 1: sum(losses[end - 4 : end]) / 4 for end in range(4, STEPS + 1, 4)}


def distances(folder: Path) -> dict[int, float]:
    """step -> sqrt(mean_i ||x_i - xbar||^2), from all workers' records."""
    x = recorded(folder, SIZE)
    apart = (x - x.mean(dim=1, keepdim=True)).square().sum(dim=2).mean(dim=1).sqrt()
    return {end - 1: float(apart[end - 1]) for end in range(4, STEPS + 1, 4)}


def column(rows: list[dict[str, Any]], key: str, step: str) -> dict[int, float]:
    return {int(row[step]): float(row[key]) for row in rows if row.get(key) not in (None, "")}


def assert_all_is_there(folder: Path, rows: list[dict[str, Any]], step: str) -> None:
    for rank in range(SIZE):
        assert column(rows, f"worker/{rank}/loss", step) == pytest.approx(worker_losses(folder, rank))
    assert column(rows, "gossip/consensus_distance", step) == pytest.approx(distances(folder))
    sent = column(rows, "gossip/bytes_sent", step)
    per_step = DIM * 8 + 256  # one neighbour, float64; padding, a round number and a verdict travel along, at most
    # A round leaves beside the training: the last one may not have when a row is written.
    assert all(s * DIM * 8 <= sent[s] <= (s + 1) * per_step for s in sent)
    assert sorted(sent) == list(range(3, STEPS, 4))
    assert all(value >= 0 for value in column(rows, "gossip/wait_seconds", step).values())
    assert set(column(rows, "gossip/refused_messages", step).values()) == {0}
    assert column(rows, "gossip/mixing_rate", step) == dict.fromkeys(range(3, STEPS, 4), 1.0)
    assert column(rows, "gossip/delay", step) == dict.fromkeys(range(3, STEPS, 4), 1.0)


PLAN = {
    "gossip/workers": SIZE,
    "gossip/devices_per_worker": 1,
    "gossip/codec": "Plain",
    "gossip/combine": "Gossip",
    "gossip/weights": "Own",
    "gossip/delay": 1,
    "gossip/evaluate": "mean",
    "gossip/heals": 3,
    "gossip/steps_to_consensus": 1,
    "gossip/model_bytes": 128,  # with its padding
    "gossip/bytes_per_step": 128,
}


def test_two_workers_in_the_csv(tmp_path: Path) -> None:
    in_processes(train, tmp_path, csv_logger)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "metrics.csv").read_text())))
    assert_all_is_there(tmp_path, rows, "step")
    kept = yaml.safe_load((tmp_path / "hparams.yaml").read_text())
    assert kept == PLAN | {"gossip/topology": "Auto -> Hypercube"}


def train_encoded(folder: Path) -> None:
    strategy = GossipStrategy(
        start_method="fork",
        codec=DifferenceCompression(Int8(block=16)),
        combine=ConsensusControl(target=0.05, most=1, probe=1, lag=1, inner=Gossip(rate=0.5)),
    )
    watched: list[Callback] = [Record(folder), MixingMonitor(every_n_steps=1)]
    options = {**QUIET, "logger": csv_logger(folder), "max_steps": 12, "devices": SIZE}
    Trainer(strategy=strategy, callbacks=watched, **options).fit(Remembering())


def rounded(difference: Array, rank: int, step: int) -> Array:
    """Int8 of one block of 16, floor(d / scale + u), in plain numpy but for the noise."""
    noise = dither(16, key(rank, step, 0, 0), 2**16, torch.device("cpu"))
    u = noise(0, 16, torch.empty(16, dtype=torch.float64)).numpy() + 0.5
    scale = float(np.float32(np.abs(difference).max()) / np.float32(127))
    return np.minimum(np.floor(difference / scale + u[:DIM]), 127) * scale


def test_rate_target_codec_error_and_delay_of_two_workers_that_encode(tmp_path: Path) -> None:
    """A message of the overlapped order is what was recorded: recompute what was lost of it, and how far they were."""
    in_processes(train_encoded, tmp_path)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "metrics.csv").read_text())))
    steps, x = range(12), recorded(tmp_path, SIZE).numpy()
    known = np.repeat(Quadratic(dim=DIM).x.detach().numpy()[None], SIZE, axis=0)
    errors, distances = {}, {}
    for step in steps:
        decoded = known + np.stack([rounded(x[step, rank] - known[rank], rank, step) for rank in range(SIZE)])
        lost, sent = np.linalg.norm(x[step, 0] - decoded[0]), np.linalg.norm(x[step, 0] - known[0])
        errors[step] = lost / sent if step in (0, 1, 2, 4, 8) else errors[step - 1]
        moved = mixing_matrix(Auto(), SIZE, step) @ decoded - decoded
        distances[step + 2] = float(np.linalg.norm(moved) / np.linalg.norm(decoded))
        known = decoded
    assert len(set(errors.values())) == 5
    assert column(rows, "gossip/codec_error", "step") == pytest.approx(errors, rel=1e-6)
    assert column(rows, "gossip/consensus_measured", "step") == pytest.approx(
        {step: distance for step, distance in distances.items() if step in steps}, rel=1e-6
    )
    assert column(rows, "gossip/consensus_target", "step") == dict.fromkeys(steps, 0.05)
    assert column(rows, "gossip/mixing_rate", "step") == dict.fromkeys(steps, 0.5)
    assert column(rows, "gossip/delay", "step") == dict.fromkeys(steps, 1.0)


def test_two_workers_in_one_wandb_run(tmp_path: Path) -> None:
    in_processes(train, tmp_path, wandb_logger)
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert_all_is_there(tmp_path, history(file), "trainer/global_step")
    assert settings(file)["recipe"] == "tiny"
    assert settings(file)["gossip/workers"] == 2


@pytest.mark.thorough
def test_one_wandb_run_per_worker(tmp_path: Path) -> None:
    in_processes(train, tmp_path, wandb_per_worker)
    files = {run(file).display_name: file for file in tmp_path.glob("wandb/offline-run-*/*.wandb")}
    assert sorted(files) == ["worker 0", "worker 1"]
    assert {run(file).run_group for file in files.values()} == {"together"}
    assert_all_is_there(tmp_path, history(files["worker 0"]), "trainer/global_step")
    other = history(files["worker 1"])
    assert column(other, "gossip/consensus_distance", "trainer/global_step") == pytest.approx(distances(tmp_path))
    assert settings(files["worker 1"])["recipe"] == "tiny"
