"""Sweeps that SPASE plans: trials choose among candidates, batches over all devices stay, what can't run is said."""

import contextlib
import io
import json
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import LightningModule, Trainer, seed_everything
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_decentral.cli import main as cli
from lightning_decentral.shared.application import Application
from lightning_decentral.sweep.plan.jobs_file import read_tables
from lightning_decentral.sweep.spase import SpaseCarrier
from tests.tiny import QUIET, in_processes

CONFIG = {
    "lr": 0.1,
    "strategy": "auto",
    "fails": False,
    "data": {"batch_size": 8},
    "trainer": {"max_epochs": 1, "max_steps": -1, "devices": 1},
    "hydra": {"sweep": {"dir": "sweep", "subdir": "${hydra:job.num}"}, "job": {"name": "spase"}},
}
ConfigStore.instance().store(name="spase_application", node=CONFIG)
DDP = '["strategy=ddp_fork","trainer.devices={devices}","data.batch_size={share}"]'
ABSENT = '["strategy=absent","trainer.devices={devices}"]'
POLICY = (
    "hydra/launcher=shard_parallel",
    "hydra/launcher/policy=spase",
    "hydra.launcher.policy.trial_steps=4",
    "hydra.launcher.devices=2",
)
EXAMPLES, LRS = 128, (0.1, 0.05, 0.02)


class Line(LightningModule):
    """A line with the mean of its batch's losses; its first worker writes down what it trained."""

    def __init__(self, lr: float, batch_size: int, folder: Path) -> None:
        super().__init__()
        self.lr, self.batch_size, self.folder = lr, batch_size, folder
        self.line, self.sizes, self.examples = nn.Linear(4, 1), list[int](), torch.randn(EXAMPLES, 4)

    def train_dataloader(self) -> DataLoader[Any]:
        """In order: the workers' k-th batches are together what one worker's is."""
        examples: Any = TensorDataset(self.examples)
        sampler: Any = DistributedSampler(examples, self.trainer.world_size, self.global_rank, shuffle=False)
        return DataLoader(examples, self.batch_size, sampler=sampler)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.sizes.append(len(batch[0]))
        loss: Tensor = (self.line(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()
        return loss

    def on_train_end(self) -> None:
        if self.global_rank == 0:
            found = {"world": self.trainer.world_size, "sizes": self.sizes, "steps": self.trainer.global_step}
            torch.save({**found, "weights": self.state_dict()}, self.folder / "found.pt")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def train(cfg: DictConfig) -> float:
    folder = Path(HydraConfig.get().runtime.output_dir)
    if cfg.fails:
        raise ArithmeticError("no luck")
    return fit(cfg, folder)


def fit(cfg: Any, folder: Path) -> float:
    seed_everything(0)
    Trainer(**{**QUIET, **cfg.trainer}, strategy=cfg.strategy).fit(Line(cfg.lr, cfg.data.batch_size, folder))
    return float(cfg.lr)


def alone(folder: Path, lr: float) -> None:
    fit(OmegaConf.create({**CONFIG, "lr": lr}), folder)


def sleep(cfg: DictConfig) -> None:
    Path(HydraConfig.get().runtime.output_dir, "pid").write_text(str(os.getpid()))
    time.sleep(60)


def slept(folder: Path, *words: str) -> None:
    swept(folder, *words, task=sleep)


def swept(folder: Path, *words: str, task: Any = train) -> str:
    os.chdir(folder)
    sys.argv = ["application", "-m", *POLICY, *words]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        hydra.main(version_base="1.3", config_path=None, config_name="spase_application")(task)()
    return printed.getvalue()


def candidates(**overrides: str) -> str:
    return f"hydra.launcher.policy.candidates={{{','.join(f'{name}:{words}' for name, words in overrides.items())}}}"


@pytest.mark.usefixtures("entry_points")
def test_three_trainings_as_planned_learn_what_they_learn_alone(tmp_path: Path) -> None:
    """The first and the last by ddp on two devices with half a batch each, the other on one."""
    rows = ["{2: 3.0}", "{1: 2.0}", "{2: 1.0}"]
    jobs = [f"  - {{name: {n}, seconds: {row}, parallelism: {{1: one, 2: ddp}}}}" for n, row in enumerate(rows)]
    (tmp_path / "tables.yaml").write_text("\n".join(["jobs:", *jobs]))
    words = f"lr={','.join(map(str, LRS))}", candidates(one="[]", ddp=DDP), "hydra.launcher.policy.table=tables.yaml"
    printed = in_processes(swept, tmp_path, *words)
    for number, lr in enumerate(LRS):
        (tmp_path / str(lr)).mkdir()
        in_processes(alone, tmp_path / str(lr), lr)
        own, other = (torch.load(tmp_path / f / "found.pt") for f in (f"sweep/{number}", str(lr)))
        world = 1 if number == 1 else 2
        assert (own["world"], own["sizes"]) == (world, [8 // world] * own["steps"])
        assert own["steps"] == other["steps"] == EXAMPLES // 8
        for name, weight in other["weights"].items():
            torch.testing.assert_close(own["weights"][name], weight, rtol=1e-4, atol=1e-6)
    assert re.search(r"6 s planned, [\d.]+ s in fact; the plan changed 0 times", printed)
    events = json.loads((tmp_path / "sweep" / "trace.json").read_text())["traceEvents"]
    turns = sorted((event["tid"], event["ts"], event["ts"] + event["dur"], event["name"][0]) for event in events)
    assert sorted(name for *_, name in turns) == list("00122")
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in pairwise(turns)), "two at a time on a device"
    assert (tmp_path / "sweep" / "gantt.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("entry_points")
def test_trials_leave_out_what_cannot_run(tmp_path: Path) -> None:
    """The batch of the second member can't be halved, and nobody knows the strategy `absent`."""
    words = "data.batch_size=8,9", candidates(one="[]", ddp=DDP, other=ABSENT), "trainer.max_epochs=4"
    printed = in_processes(swept, tmp_path, *words)
    assert "1/ddp-2 : left out, data.batch_size=9 can't be divided among 2 devices" in printed
    assert re.search(r"0/other-2 : left out, [^\n]*absent[^\n]* \(0 steps of 7 within [\d.]+ s\); its log: ", printed)
    a, b = read_tables(tmp_path / "sweep" / "tables.yaml", trained=True)
    assert (a.name, a.parallelism, b.name, b.parallelism) == ("0", {1: "one", 2: "ddp"}, "1", {1: "one"})
    for number in "01":
        assert torch.load(tmp_path / "sweep" / number / "found.pt")["steps"] == 4 * -(-EXAMPLES // (8 + int(number)))


@pytest.mark.usefixtures("entry_points")
def test_a_member_that_no_candidate_runs_fails_alone_and_is_tried_again_when_resumed(tmp_path: Path) -> None:
    for more in ((), ("hydra.launcher.resume=true",)):
        with pytest.raises(RuntimeError, match=r"no candidate runs it: one on 1: ArithmeticError: no luck"):
            in_processes(swept, tmp_path, "fails=false,true", candidates(one="[]"), *more)
        assert (tmp_path / "sweep" / "0" / "found.pt").exists() == (not more), "the first isn't run again"
        (tmp_path / "sweep" / "0" / "found.pt").unlink(missing_ok=True)
    record = json.loads((tmp_path / "sweep" / "1" / "member.json").read_text())
    assert record["status"] == "FAILED"


@pytest.mark.usefixtures("entry_points")
def test_a_table_that_a_member_cannot_follow_is_refused_before_anyone_starts(tmp_path: Path) -> None:
    row = "{name: 0, seconds: {1: 2.0, 2: 1.0}, parallelism: {1: one, 2: ddp}}"
    (tmp_path / "tables.yaml").write_text(f"jobs: [{row}]")
    words = candidates(one="[]", ddp=DDP), "hydra.launcher.policy.table=tables.yaml"
    with pytest.raises(RuntimeError, match=r"ValueError: data\.batch_size=9 can't be divided among 2 devices"):
        in_processes(swept, tmp_path, "data.batch_size=9", *words)
    with pytest.raises(RuntimeError, match=r"policy\.table: ddp is none of policy\.candidates"):
        in_processes(swept, tmp_path, candidates(one="[]"), "hydra.launcher.policy.table=tables.yaml")
    with pytest.raises(RuntimeError, match=r"member 0 asks for trainer\.devices=2, which spase chooses: leave it out"):
        in_processes(swept, tmp_path, candidates(one="[]"), "trainer.devices=2")
    assert not list(tmp_path.rglob("found.pt"))


@pytest.mark.usefixtures("entry_points")
def test_a_trial_that_hangs_is_ended(tmp_path: Path) -> None:
    words = candidates(one="[]"), "hydra.launcher.policy.trial_limit_seconds=1.5"
    with pytest.raises(
        RuntimeError, match=r"no candidate runs it: one on 1: .*exit code -9 \(0 steps of 7 within 1\.[5-9]"
    ):
        in_processes(slept, tmp_path, *words)


@pytest.mark.usefixtures("entry_points")
def test_an_interrupt_ends_the_trials(tmp_path: Path) -> None:
    def sleeping() -> None:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        slept(tmp_path, "lr=1,2", candidates(one="[]"))

    def until(condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end, "it never came"
            time.sleep(0.02)

    sweep = multiprocessing.get_context("fork").Process(target=sleeping)
    sweep.start()
    try:
        files = [tmp_path / "sweep" / "trials" / name / "one-1" / "pid" for name in "01"]
        until(lambda: all(file.exists() and file.read_text() for file in files))
        assert sweep.pid is not None
        os.kill(sweep.pid, signal.SIGINT)
        sweep.join(30)
        assert sweep.exitcode not in (None, 0)
        until(lambda: not any(Path(f"/proc/{file.read_text()}").exists() for file in files))
    finally:
        sweep.kill()


JOBS = """
jobs:
  - {name: known, overrides: [lr=0.1, trainer.max_steps=20], seconds: {1: 2.0}, parallelism: {1: one_device}}
  - {name: tried, overrides: [lr=0.02, trainer.max_steps=30]}
"""


def scheduled(folder: Path, *words: str) -> str:
    os.chdir(folder)
    (folder / "jobs.yaml").write_text(JOBS)
    application = Application("lightning_decentral.conf", "spase_application", train, no_model)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        cli.main(application, ["schedule", "jobs.yaml", "--policy", "spase", *words])
    return printed.getvalue()


def no_model(cfg: DictConfig, sizes: dict[str, int]) -> LightningModule:
    raise AssertionError("a schedule builds none")


@pytest.mark.usefixtures("entry_points")
def test_a_files_trainings_are_tried_and_carried_out(tmp_path: Path) -> None:
    printed = in_processes(
        scheduled, tmp_path, "--run", "--measured", "8", "--chrome", "trace.json", "--plot", "two.png"
    )
    (outputs,) = (tmp_path / "outputs").iterdir()
    for name, steps in (("known", 20), ("tried", 30)):
        assert torch.load(outputs / name / "found.pt")["steps"] == steps
    assert [path.name for path in (outputs / "trials").iterdir()] == ["tried"]
    assert {table.name for table in read_tables(outputs / "tables.yaml")} == {"known", "tried"}
    assert re.search(r"makespan [\d.]+ s simulated, [\d.]+ s for real \(.*whole trainings, with their start", printed)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sorted({event["pid"] for event in events}) == ["spase, planned", "spase, real"]
    assert (tmp_path / "two.png").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "job 2: --policy spase needs a table of seconds of the whole job by devices"),
        (("--run", "--measured", "3"), "measured must be more than 5 steps"),
    ],
)
def test_a_schedules_mistakes_are_one_line(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=f"SystemExit: error: [^\n]*{message}"):
        in_processes(scheduled, tmp_path, *words)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"candidates": ["dpp"]},
            "policy.candidates: use some of one_device, spilled, ddp, compressed, token_pipeline",
        ),
        ({"candidates": []}, "policy.candidates: use some of"),
        ({"trial_steps": 0}, "must be above 0"),
        ({"interval_seconds": 0.0}, "must be above 0"),
        ({"table": "no/where.yaml"}, "no/where.yaml"),
    ],
)
def test_mistakes_are_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        SpaseCarrier(["cpu", "cpu"], None, "spase", 0.25, **options)
    assert "\n" not in str(error.value)


def test_memory_is_no_option() -> None:
    with pytest.raises(ValueError, match="memory_bytes: leave it out, under spase"):
        SpaseCarrier(1, 1000, "spase", 0.25)
