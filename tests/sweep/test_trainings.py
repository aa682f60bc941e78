"""Real trainings of a file of jobs as the command runs them, tiny ones: their weights, their turns, what is printed."""

import contextlib
import io
import json
import os
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import LightningModule, Trainer, seed_everything
from omegaconf import DictConfig, OmegaConf

from lightning_decentral.cli import main as cli
from lightning_decentral.shared.application import Application
from lightning_decentral.shared.compute.hardware import cores
from lightning_decentral.sweep.plan.policy import POLICIES
from tests.sweep.application import Tuned
from tests.tiny import QUIET, SizedBatches, in_processes

CONFIG = {"lr": 0.1, "fails": False, "trainer": {"max_epochs": 1, "max_steps": -1, "devices": 1}}
ConfigStore.instance().store(name="schedule_application", node=CONFIG)

JOBS = """
jobs:
  - {name: later, overrides: [lr=0.01, trainer.max_steps=9], arrival_seconds: 0.3}
  - {name: first, overrides: [lr=0.1, trainer.max_steps=40]}
  - {name: second, overrides: [lr=0.001, trainer.max_steps=30]}
"""
ALONE = {"first": (0.1, 40), "second": (0.001, 30), "later": (0.01, 9)}
FAILING = "jobs: [{name: unlucky, overrides: [fails=true, trainer.max_steps=3]}]"


def train(cfg: DictConfig) -> None:
    """Weights into its output folder."""
    fit(cfg, Path(HydraConfig.get().runtime.output_dir))


def fit(cfg: DictConfig, folder: Path) -> None:
    if cfg.fails:
        raise ArithmeticError("no luck")
    seed_everything(0)
    module = Tuned(cfg.lr, 0.2)
    options: dict[str, Any] = {**QUIET, **cfg.trainer}
    Trainer(**options).fit(module, SizedBatches(6))
    torch.save(module.state_dict(), folder / "weights.pt")


def no_model(cfg: DictConfig, sizes: dict[str, int]) -> LightningModule:
    raise AssertionError("a schedule builds none")


def alone(folder: Path) -> None:
    """The same trainings one after the other, without any sweep."""
    for name, (lr, steps) in ALONE.items():
        (folder / name).mkdir()
        trainer = {"max_epochs": -1, "max_steps": steps, "devices": 1}
        fit(OmegaConf.create({**CONFIG, "lr": lr, "trainer": trainer}), folder / name)


def scheduled(folder: Path, *words: str, policies: str = "round_robin,lrtf") -> str:
    """What the command prints; the first of the policies is run."""
    os.chdir(folder)
    application = Application("lightning_decentral.conf", "schedule_application", train, no_model)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        cli.main(application, ["schedule", "jobs.yaml", "--policy", policies, *words])
    return printed.getvalue()


@pytest.mark.skipif(cores() < 2, reason="two devices that train need two cores")
@pytest.mark.usefixtures("entry_points")
def test_trainings_run_as_scheduled_and_learn_as_alone(tmp_path: Path) -> None:
    (tmp_path / "jobs.yaml").write_text(JOBS)
    printed = in_processes(scheduled, tmp_path, "--devices", "2", "--run", "--chrome", "trace.json", "--measured", "12")
    assert "measuring 12 steps of first, second, later in outputs/" in printed
    assert "s for real (" in printed
    assert "the trainings themselves, from the moment at which all waited for their first step" in printed
    (output,) = (tmp_path / "outputs").iterdir()
    in_processes(alone, tmp_path)
    for name in ALONE:
        one, other = torch.load(tmp_path / name / "weights.pt"), torch.load(output / name / "weights.pt")
        assert all(torch.equal(one[key], other[key]) for key in one)
        assert (output / "measured" / name / "member.log").exists()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["pid"] == "simulated" for event in events) == 40 + 30 + 9
    real = [event for event in events if event["pid"] == "real"]
    assert {event["tid"] for event in real} == {"device 0", "device 1"}
    assert min(event["ts"] for event in real) == 0, "from when all were there"
    assert min(event["ts"] for event in real if event["name"].startswith("later")) >= 0.3e6
    for row in ("device 0", "device 1"):
        turns = sorted((e["ts"], e["ts"] + e["dur"]) for e in real if e["tid"] == row)
        assert all(a[1] <= b[0] for a, b in pairwise(turns))


@pytest.mark.thorough
@pytest.mark.skipif(cores() < 2, reason="two devices that train need two cores")
@pytest.mark.parametrize("policy", sorted(POLICIES.keys() - {"round_robin"}))
@pytest.mark.usefixtures("entry_points")
def test_under_every_policy_trainings_learn_as_alone(policy: str, tmp_path: Path) -> None:
    (tmp_path / "jobs.yaml").write_text(JOBS)
    words = ("--devices", "2", "--run", "--measured", "12")
    in_processes(partial(scheduled, policies=policy), tmp_path, *words)
    (output,) = (tmp_path / "outputs").iterdir()
    in_processes(alone, tmp_path)
    for name in ALONE:
        one, other = torch.load(tmp_path / name / "weights.pt"), torch.load(output / name / "weights.pt")
        assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.usefixtures("entry_points")
def test_a_training_that_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "jobs.yaml").write_text(FAILING)
    with pytest.raises(
        RuntimeError, match=r"error: job unlucky failed, ArithmeticError: no luck; its log: .*unlucky/member\.log"
    ):
        in_processes(scheduled, tmp_path)
