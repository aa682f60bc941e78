"""Members of a sweep against the same trainings alone, bit for bit: policies, evictions, failures, devices, loggers."""

import os
import sys
from itertools import combinations, product
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from hydra_plugins.shard_parallel.launcher import POLICIES
from tests.sweep.application import Tuned
from tests.tiny import QUIET, SizedBatches, in_processes

CONFIG = {
    "lr": 0.1,
    "fails": False,
    "logs": False,
    "trainer": {"max_epochs": 2, "devices": 1},
    "hydra": {"sweep": {"dir": "sweep", "subdir": "${lr}-${trainer.devices}-${fails}"}, "job": {"name": "alone"}},
}
ConfigStore.instance().store(name="alone_application", node=CONFIG)
LRS = (0.1, 0.01)
AXES = {
    "policy": tuple(POLICIES),
    "evicting": (False, True),
    "failing": (False, True),
    "wide": (False, True),
    "logs": (False, True),
    "batches": (False, True),
}
Case = dict[str, Any]
# Of one member at a time: its parameters, gradients and optimizer state are 2,832 bytes.
TIGHT = "hydra.launcher.memory_bytes=4000"
# Validations are counted, nobody is compared.
PATIENT = ("hydra.launcher.policy.metric=val_loss", "hydra.launcher.policy.min_validations=100")


class Unlucky(Tuned):
    """Fails in the middle of a batch, with the device in its hands."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step == 7:
            raise ArithmeticError("no luck")
        return super().training_step(batch, batch_idx)


def train(cfg: DictConfig) -> None:
    fit(cfg, Path(HydraConfig.get().runtime.output_dir))


def fit(cfg: DictConfig, folder: Path) -> None:
    """Leaves its weights in the folder, and what it has logged."""
    seed_everything(0)
    module = (Unlucky if cfg.fails else Tuned)(cfg.lr, 0.2)
    options: dict[str, Any] = {**QUIET, **cfg.trainer}
    if cfg.logs:
        options |= {"logger": CSVLogger(folder, name="", version="logged"), "log_every_n_steps": 1}
    trainer = Trainer(**options, strategy="ddp_fork" if cfg.trainer.devices > 1 else "auto")
    trainer.fit(module, SizedBatches(6), SizedBatches(2))
    torch.save(module.state_dict(), folder / "weights.pt")


def alone(folder: Path, lr: float, devices: int) -> None:
    folder.mkdir()
    cfg = OmegaConf.create({**CONFIG, "lr": lr, "logs": True, "trainer": {"max_epochs": 2, "devices": devices}})
    fit(cfg, folder)


def swept(folder: Path, *words: str) -> None:
    os.chdir(folder)
    sys.argv = ["application", "-m", "hydra/launcher=shard_parallel", *words]
    hydra.main(version_base="1.3", config_path=None, config_name="alone_application")(train)()


def pairs(case: Case) -> set[Any]:
    return set(combinations(case.items(), 2))


def covering() -> list[Case]:
    """Every pair of values of two axes is in one of the cases; the next case adds the most."""
    every = [dict(zip(AXES, values, strict=True)) for values in product(*AXES.values())]
    wanted, found = set().union(*map(pairs, every)), []
    while wanted:
        found.append(max(every, key=lambda case: len(pairs(case) & wanted)))
        wanted -= pairs(found[-1])
    return found


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    for lr, devices in product(LRS, (1, 2)):
        in_processes(alone, folder / f"{lr}-{devices}", lr, devices)
    return folder


@pytest.mark.sampled
@pytest.mark.parametrize("case", covering(), ids=lambda case: "-".join(str(value) for value in case.values()))
@pytest.mark.usefixtures("entry_points")
def test_each_member_is_what_it_is_alone(case: Case, references: Path, tmp_path: Path) -> None:
    words = [f"lr={','.join(map(str, LRS))}", f"logs={case['logs']}", "hydra.launcher.quantum_seconds=0.001"]
    words += [f"hydra/launcher/policy={case['policy']}", "hydra.launcher.devices=2"]
    words += PATIENT if case["policy"] == "asha" else ()
    words += [TIGHT] if case["evicting"] else []
    words += ["trainer.devices=1,2"] if case["wide"] else []
    words += ["fails=False,True"] if case["failing"] else []
    words += ["hydra.sweeper.max_batch_size=3"] if case["batches"] and not case["failing"] else []
    if case["failing"]:
        with pytest.raises(RuntimeError, match="ArithmeticError: no luck"):
            in_processes(swept, tmp_path, *words)
    else:
        in_processes(swept, tmp_path, *words)
    members = [(lr, devices) for lr in LRS for devices in ((1, 2) if case["wide"] else (1,))]
    assert len(list(tmp_path.glob("sweep/*/member.json"))) == len(members) * (1 + case["failing"])
    for lr, devices in members:
        own, reference = tmp_path / "sweep" / f"{lr}-{devices}-False", references / f"{lr}-{devices}"
        one, other = (torch.load(folder / "weights.pt") for folder in (own, reference))
        assert all(torch.equal(one[name], other[name]) for name in other), (lr, devices)
        if case["logs"]:
            assert metrics(own) == metrics(reference)


def metrics(folder: Path) -> str:
    return (folder / "logged" / "metrics.csv").read_text()
