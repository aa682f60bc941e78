"""Jobs of two workers that share two devices piece by piece: each learns what it learns alone; who dies is alone."""

import contextlib
import io
import json
import multiprocessing
import os
import re
import signal
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import hydra
import pytest
import torch
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import LightningModule, Trainer, seed_everything
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from lightning_decentral import PartialBackpropStrategy
from lightning_decentral.cli import main as cli
from lightning_decentral.partial import Staircase
from lightning_decentral.shared.application import Application
from tests.sweep.test_launcher import alive, wait_for
from tests.tiny import QUIET, SizedBatches, in_processes

CONFIG = {
    "lr": 0.1,
    "dies": "never",
    "optimizer": "AdamW",
    "strategy": {"_target_": "lightning_decentral.PartialBackpropStrategy", "start_method": "fork", "cuts": 1},
    "trainer": {"max_epochs": 2, "max_steps": -1, "devices": 2, "accumulate_grad_batches": 1},
    "hydra": {"sweep": {"dir": "sweep", "subdir": "${hydra:job.num}"}, "job": {"name": "jigsaw"}},
}
ConfigStore.instance().store(name="jigsaw_application", node=CONFIG)
LRS = (0.1, 0.01, 0.001)


class Chain(LightningModule):
    """Four equal blocks and a head; ends its worker 1 in the fifth step, if it is told to."""

    def __init__(self, lr: float, dies: str, optimizer: str) -> None:
        super().__init__()
        self.lr, self.dies, self.optimizer = lr, dies, optimizer
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.ReLU()) for _ in range(4)))
        self.head = nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.dies == "interrupted":
            Path(f"pid-{os.getpid()}").touch()
        if self.global_step == 4 and self.global_rank == 1:
            match self.dies:
                case "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "fails":
                    raise ArithmeticError("no luck")
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=True)  # within a piece the workers wait for each other
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.blocks(batch[0])), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = getattr(torch.optim, self.optimizer)(self.parameters(), lr=self.lr)
        return optimizer


def train(cfg: DictConfig) -> None:
    fit(cfg, Path(HydraConfig.get().runtime.output_dir))


def fit(cfg: DictConfig, folder: Path) -> None:
    seed_everything(0)
    module = Chain(cfg.lr, cfg.dies, cfg.optimizer)
    partial = PartialBackpropStrategy(depth=Staircase(), cuts=1, start_method="fork")
    strategy = "ddp_fork" if cfg.dies == "ddp" else partial
    Trainer(**{**QUIET, **cfg.trainer}, strategy=strategy).fit(module, SizedBatches(6), SizedBatches(2))
    torch.save(module.state_dict(), folder / "weights.pt")


def alone(folder: Path, lr: float, *words: str) -> None:
    fit(cast(DictConfig, OmegaConf.merge(CONFIG, {"lr": lr}, OmegaConf.from_dotlist([*words]))), folder)


def swept(folder: Path, *words: str) -> None:
    os.chdir(folder)
    sys.argv = ["application", "-m", "hydra/launcher=shard_parallel", "hydra.launcher.policy=jigsaw", *words]
    hydra.main(version_base="1.3", config_path=None, config_name="jigsaw_application")(train)()


@pytest.mark.parametrize("words", [(), ("trainer.accumulate_grad_batches=2",), ("optimizer=LBFGS",)], ids=str)
@pytest.mark.usefixtures("entry_points")
def test_jobs_in_turn_learn_what_they_learn_alone(tmp_path: Path, words: tuple[str, ...]) -> None:
    in_processes(swept, tmp_path, f"lr={','.join(map(str, LRS))}", "hydra.launcher.devices=2", *words)
    for number, lr in enumerate(LRS):
        (tmp_path / str(lr)).mkdir()
        in_processes(alone, tmp_path / str(lr), lr, *words)
        own, other = (torch.load(tmp_path / f / "weights.pt") for f in (f"sweep/{number}", str(lr)))
        assert all(torch.equal(own[name], other[name]) for name in other), lr
    events = json.loads((tmp_path / "sweep" / "trace.json").read_text())["traceEvents"]
    for row in ("cpu:0", "cpu:1"):
        turns = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["tid"] == row)
        assert len(turns) >= 3 * 12
        assert all(a[1] <= b[0] for a, b in pairwise(turns))


@pytest.mark.parametrize("dies", ["killed", "fails"])
@pytest.mark.usefixtures("entry_points")
def test_a_job_that_loses_a_worker_fails_alone(dies: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"no luck|SIGKILL"):
        in_processes(swept, tmp_path, f"dies=never,{dies},never", "hydra.launcher.devices=2")
    outcomes = [json.loads((tmp_path / f"sweep/{n}/member.json").read_text())["status"] for n in range(3)]
    assert outcomes == ["COMPLETED", "FAILED", "COMPLETED"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trainer.devices=2,1"], r"member 1 trains by PartialBackpropStrategy on 1 device, but under jigsaw each job"),
        (["lr=0.1", "strategy._target_=lightning_decentral.GossipStrategy"], "member 0 trains by GossipStrategy on 2"),
        (["lr=0.1", "hydra.launcher.devices=1"], "policy=jigsaw needs 2 or more devices"),
        (["lr=0.1", "hydra.launcher.memory_bytes=1000"], "memory_bytes=1000: under jigsaw all members alive stay"),
    ],
)
@pytest.mark.usefixtures("entry_points")
def test_what_jigsaw_cannot_carry_out_is_refused_before_training(
    words: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match=message):
        in_processes(swept, tmp_path, "hydra.launcher.devices=2", *words)
    assert not (tmp_path / "sweep" / "0").exists()


@pytest.mark.usefixtures("entry_points")
def test_a_member_whose_configuration_hides_its_strategy_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="member 0 trains by DDPStrategy on 2 devices, but under jigsaw each job"):
        in_processes(swept, tmp_path, "dies=ddp", "hydra.launcher.devices=2")


def endless(folder: Path) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal, wherever the tests run
    swept(folder, "lr=0.1,0.01", "dies=interrupted", "trainer.max_epochs=100000", "hydra.launcher.devices=2")


@pytest.mark.usefixtures("entry_points")
def test_an_interrupt_ends_all_workers_of_all_jobs(tmp_path: Path) -> None:
    sweep = multiprocessing.get_context("fork").Process(target=endless, args=(tmp_path,))
    sweep.start()
    try:
        wait_for(lambda: len(list(tmp_path.glob("pid-*"))) == 4, 60)
        pids = [int(path.name.partition("-")[2]) for path in tmp_path.glob("pid-*")]
        os.kill(sweep.pid or 0, signal.SIGINT)
        sweep.join(30)
        assert sweep.exitcode not in (None, 0)
        wait_for(lambda: not any(map(alive, pids)))
    finally:
        sweep.kill()


JOBS = """
jobs:
  - {name: short, overrides: [lr=0.1, trainer.max_steps=6]}
  - {name: long, overrides: [lr=0.01, trainer.max_steps=12]}
"""


def no_model(cfg: DictConfig, sizes: dict[str, int]) -> LightningModule:
    raise AssertionError("a schedule builds none")


def scheduled(folder: Path, *words: str) -> str:
    os.chdir(folder)
    application = Application("lightning_decentral.conf", "jigsaw_application", train, no_model)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        cli.main(application, ["schedule", "jobs.yaml", "--policy", "jigsaw", *words])
    return printed.getvalue()


@pytest.mark.usefixtures("entry_points")
def test_trainings_of_a_file_are_measured_planned_and_carried_out(tmp_path: Path) -> None:
    (tmp_path / "jobs.yaml").write_text(JOBS)
    files = ("--chrome", "trace.json", "--plot", "gantt.png")
    printed = in_processes(scheduled, tmp_path, "--run", "--measured", "6", *files)
    assert re.search(r"JigSaw.*, one job after the other", printed)
    assert "JigSaw's gangs, from the moment at which all waited for their first piece" in " ".join(printed.split())
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for title in ("jigsaw, planned", "jigsaw, real"):
        rows = [event for event in events if event["pid"] == title]
        assert len(rows) == 2 * (6 + 12)
        assert {event["tid"] for event in rows} == {"device 0", "device 1"}
    assert (tmp_path / "gantt.png").stat().st_size > 1000
    (output,) = (tmp_path / "outputs").iterdir()
    assert {path.parent.name for path in output.glob("*/weights.pt")} == {"short", "long"}
