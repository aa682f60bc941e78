"""W&B runs of workers: their ids agree, go on after a resume, and may be one run in W&B's shared mode."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import wandb
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_decentral.shared import WandbPerWorker
from lightning_decentral.shared.checkpoint import runs
from tests.tiny import QUIET, Quadratic, in_processes
from tests.wandb_file import records, run


class Logged(Quadratic):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def fit(folder: Path, steps: int, path: str | None = None) -> None:
    """Two forked workers, which save at every tenth step."""
    logger = WandbPerWorker(project="t", save_dir=str(folder), offline=True)
    saving = ModelCheckpoint(folder, filename="last", every_n_train_steps=10, enable_version_counter=False)
    options = {**QUIET, "enable_checkpointing": True, "max_steps": steps, "log_every_n_steps": 1, "devices": 2}
    options |= {"strategy": "gossip_fork", "logger": logger}
    Trainer(**options, callbacks=[saving]).fit(Logged(), ckpt_path=path)


def test_a_resumed_training_goes_on_in_its_workers_runs_which_are_finished(tmp_path: Path) -> None:
    in_processes(fit, tmp_path, 10)
    in_processes(fit, tmp_path, 20, str(tmp_path / "last.ckpt"))
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    ids = [run(file).run_id for file in files]
    assert len(ids) == 4
    assert len(set(ids)) == 2
    assert {one.rpartition("-")[2] for one in ids} == {"0", "1"}
    assert len({one.rpartition("-")[0] for one in ids}) == 1  # both workers' begin alike
    assert all(any(record.HasField("exit") for record in records(file)) for file in files)


def of_worker_0(folder: Path) -> None:
    logger = WandbLogger(project="t", save_dir=folder, offline=True)  # opened by the worker
    options = {**QUIET, "max_steps": 4, "devices": 2, "strategy": "gossip_fork", "logger": logger}
    Trainer(**options).fit(Logged())


def test_a_run_that_a_forked_worker_opens_is_finished(tmp_path: Path) -> None:
    in_processes(of_worker_0, tmp_path)
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert [record.exit.exit_code for record in records(file) if record.HasField("exit")] == [0]


def test_a_run_that_fails_is_finished_as_that_and_one_that_was_open_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    before, own = (SimpleNamespace(finish=lambda exit_code: codes.append(exit_code)) for _ in range(2))
    monkeypatch.setattr(wandb, "run", before)
    with runs.finished():
        pass
    assert codes == []

    def fails() -> None:
        with runs.finished():
            monkeypatch.setattr(wandb, "run", own)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert codes == [1]


def test_an_id_of_the_users_own_stays() -> None:
    chosen, free = (WandbPerWorker(project="t", id=one) for one in ("own", None))
    assert (runs.without_run(chosen), runs.without_run(free)) == (False, True)
    checkpoint: dict[str, Any] = {}
    runs.keep(SimpleNamespace(loggers=[chosen]), checkpoint)  # type: ignore[arg-type]
    assert checkpoint == {runs.KEY: '{"t/workers": "own"}'}
    other = WandbPerWorker(project="elsewhere", id="its own")
    runs.agree([free, other], lambda own: [("t", "of worker 0", "its group")])
    assert (free.id, free.version, other.id) == ("of worker 0", "its group", "its own")


def test_a_logger_that_one_worker_alone_has_holds_up_nobody() -> None:
    calls: list[Any] = []
    for loggers in ([WandbPerWorker(project="t")], []):
        runs.agree(loggers, lambda own: calls.append(own) or [])
    assert [len(own) for own in calls] == [1, 0]  # one broadcast on each worker


class Started:
    """What `wandb.init` was given, and the run that it returned."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}
        self.logged: list[dict[str, Any]] = []

    def init(self, **given: Any) -> Any:
        self.given = given
        return SimpleNamespace(define_metric=lambda *_, **__: None, log=self.logged.append)


@pytest.mark.parametrize(("rank", "key"), [(0, "loss"), (2, "worker_2/loss")])
def test_all_workers_share_one_run(rank: int, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started()
    monkeypatch.setattr(wandb, "init", started.init)
    monkeypatch.setattr(rank_zero_only, "rank", rank, raising=False)
    logger = WandbPerWorker(project="t", id="one", shared=True)
    logger.log_metrics({"loss": 0.5}, step=3)
    settings = started.given["settings"]
    assert (started.given["id"], started.given["resume"]) == ("one", None)
    assert (settings.mode, settings.x_label) == ("shared", f"worker {rank}")
    assert settings.x_primary is settings.x_update_finish_state is (rank == 0)
    assert started.logged == [{key: 0.5, "trainer/global_step": 3}]


def test_what_cannot_be_shared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="shared=True needs a connection"):
        WandbPerWorker(shared=True, offline=True)
    monkeypatch.setattr(wandb, "__version__", "0.19.8")
    with pytest.raises(ValueError, match=r"needs wandb 0\.19\.9, got 0\.19\.8"):
        WandbPerWorker(shared=True)
