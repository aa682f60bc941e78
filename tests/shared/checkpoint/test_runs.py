"""A training that is resumed, whoever resumes it, goes on in the W&B run of its checkpoint."""

import json
import pickletools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import wandb
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from omegaconf import OmegaConf

from lightning_decentral import GossipStrategy
from lightning_decentral.shared.checkpoint import runs
from tests.tiny import QUIET, Quadratic, in_processes
from tests.wandb_file import history, run


def fit(folder: Path, steps: int, **given: Any) -> None:
    """One worker, which saves at every tenth step."""
    logger = WandbLogger(project="t", save_dir=folder, offline=True, id=given.pop("id", None))
    saving = ModelCheckpoint(folder, filename="last", every_n_train_steps=10, enable_version_counter=False)
    options = {**QUIET, "enable_checkpointing": True, "max_steps": steps, "log_every_n_steps": 1, "devices": 1}
    options |= {"strategy": GossipStrategy(), "logger": [CSVLogger(folder), logger]}
    Trainer(**options, callbacks=[saving]).fit(Logged(), ckpt_path=given.get("path"))
    wandb.finish()


class Logged(Quadratic):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def first(folder: Path) -> None:
    fit(folder, 10)


def resumed(folder: Path) -> None:
    fit(folder, 20, path=str(folder / "last.ckpt"))


def with_an_id(folder: Path) -> None:
    fit(folder, 30, path=str(folder / "last.ckpt"), id="own")


def test_a_resumed_training_goes_on_in_its_run_and_an_id_of_the_users_own_stays(tmp_path: Path) -> None:
    for part in (first, resumed, with_an_id):
        in_processes(part, tmp_path)
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    ids = [run(file).run_id for file in files]
    assert ids[0] == ids[1] != ids[2] == "own"
    steps = [[row["trainer/global_step"] for row in history(file) if "loss" in row] for file in files]
    assert steps == [[*range(10)], [*range(10, 20)], [*range(20, 30)]]


def saved(path: Path, ids: Any, **more: Any) -> str:
    torch.save({**more, runs.KEY: json.dumps(ids)}, path)
    return str(path)


def test_a_checkpoint_is_looked_into_but_not_loaded(tmp_path: Path) -> None:
    class Refuses:
        def __reduce__(self) -> Any:
            return pytest.fail, ("it was loaded",)

    path = saved(tmp_path / "a", {"p": "x", "q": None}, weight=torch.ones(3), z=Refuses())
    assert runs.kept_in(path) == {"p": "x"}
    torch.save({runs.KEY: '{"p": "x"}', "last": "y"}, path, pickle_protocol=4)
    assert runs.kept_in(path) == {"p": "x"}


def odd(folder: Path) -> Iterator[Path]:
    """Files of which the load reports what is wrong, and some that are well but have no ids."""
    yield from (folder / "missing", folder)
    for number, content in enumerate(({"c": "d"}, {runs.KEY: '["x", null]'}, {runs.KEY: "no JSON", "a": "{}"})):
        torch.save(content, folder / str(number))
        yield folder / str(number)
    text = '{"p": "x"}'
    torch.save({"before": text, runs.KEY: text, "after": '{"p": "y"}'}, folder / "memorised")
    yield folder / "memorised"
    whole = bytearray(Path(saved(folder / "whole", {"p": "x"})).read_bytes())
    for name, cut in {"flipped": whole.replace(b"runs", b"ruNs"), "cut": whole[:-50], "text": b"no checkpoint"}.items():
        (folder / name).write_bytes(cut)
        yield folder / name


def test_a_damaged_or_odd_file_has_no_ids(tmp_path: Path) -> None:
    assert {path.name: found for path in odd(tmp_path) if (found := runs.kept_in(str(path)))} == {}
    assert runs.kept_in("nowhere://x") == {}


def test_the_search_stops_at_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    genops = pickletools.genops
    monkeypatch.setattr(pickletools, "genops", lambda file: (read.append(op) or op for op in genops(file)))
    assert runs.kept_in(saved(tmp_path / "a", {"p": "x"}, numbers=[*range(1000)])) == {"p": "x"}
    assert len(read) <= 2


def of(*loggers: Logger) -> Trainer:
    return Trainer(**{**QUIET, "devices": 1, "logger": list(loggers), "strategy": GossipStrategy()})


def gone_on(path: str, *loggers: Logger) -> list[str | None]:
    runs.go_on(of(*loggers), path)
    return [getattr(logger, "_id", None) for logger in loggers]


def offline(**given: Any) -> WandbLogger:
    return WandbLogger(offline=True, **{"project": "p", **given})


def test_loggers_are_matched_by_project_and_the_run_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runs, "rank_zero_info", print)
    path = saved(tmp_path / "a", {"p": "x", "q": "y"})
    loggers = offline(project="q"), CSVLogger(tmp_path), offline(), offline(project="other")
    assert gone_on(path, *loggers) == ["y", None, "x", None]
    assert [logger._wandb_init["id"] for logger in loggers if isinstance(logger, WandbLogger)] == ["y", "x", None]
    end = "of the checkpoint; for a new run give the logger an id of its own"
    assert capsys.readouterr().out.splitlines() == [f"wandb continues run {run} {end}" for run in "yx"]


def test_what_the_user_decides_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "a", {"p": "x"})
    given: tuple[dict[str, Any], ...] = ({"id": "own"}, {"resume": "never"}, {"resume": False}, {"version": "own"})
    assert [gone_on(path, offline(**one)) for one in given] == [["own"], [None], [None], ["own"]]
    opened = offline(experiment=SimpleNamespace(id="open"))
    assert gone_on(path, opened) == [None]
    monkeypatch.setenv("WANDB_RUN_ID", "own")
    assert gone_on(path, offline()) == [None]


@pytest.mark.parametrize("mode", [RunMode.RUN, RunMode.MULTIRUN])
def test_members_of_a_sweep_from_one_checkpoint_begin_runs_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: RunMode
) -> None:
    path, logger = saved(tmp_path / "a", {"p": "x"}), offline()
    trainer = of(logger)
    monkeypatch.setattr(HydraConfig.instance(), "cfg", OmegaConf.create({"hydra": {"mode": mode}}))
    runs.go_on(trainer, path)
    assert logger._id == ("x" if mode == RunMode.RUN else None)


def test_other_loggers_are_not_asked(tmp_path: Path) -> None:
    class Opens(CSVLogger):
        """As MLflow's, whose run begins when its version is read."""

        @property
        def version(self) -> Any:
            pytest.fail("its run began")

    logger = Opens(tmp_path)
    logger._run_id = None  # type: ignore[attr-defined]
    assert gone_on(saved(tmp_path / "a", {"p": "x"}), logger) == [None]
    checkpoint: dict[str, Any] = {}
    runs.keep(SimpleNamespace(loggers=[logger]), checkpoint)  # type: ignore[arg-type]
    assert checkpoint == {}
