"""Trainers of both packages take the same steps, bit for bit, and each goes on from the other's checkpoints."""

import os
import pickle
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from pytorch_lightning import Trainer
from pytorch_lightning.strategies import StrategyRegistry

import lightning_decentral.pytorch_lightning as mirrored
from tests import ports
from tests.fresh import Script
from tests.packaging.project import ROOT
from tests.pytorch_lightning.packages import HOMES, PACKAGES, SIZE, gossiping, one_model
from tests.tiny import in_processes, recorded


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """{package: the folder of eight steps that nothing interrupted}"""
    folders = {package: tmp_path_factory.mktemp(package) for package in PACKAGES}
    for package, folder in folders.items():
        strategy = in_processes(gossiping, package, folder, "gossip_fork", 8)
        assert strategy == f"{HOMES[package]}.gossip.strategy.GossipStrategy"
    return folders


def test_gossip_takes_the_same_steps(whole: dict[str, Path]) -> None:
    here, there = (recorded(folder, SIZE) for folder in whole.values())
    assert torch.equal(here, there)
    assert not torch.equal(here[-1, 0], here[-1, 1]), "workers drift"


@pytest.mark.sampled
@pytest.mark.parametrize("package", PACKAGES)
def test_a_checkpoint_of_the_other_package_is_resumed_bit_for_bit(
    package: str, whole: dict[str, Path], tmp_path: Path
) -> None:
    (other,) = set(PACKAGES) - {package}
    in_processes(gossiping, package, tmp_path, "gossip_fork", 8, whole[other] / "at-step=4.ckpt")
    assert torch.equal(recorded(tmp_path, SIZE), recorded(whole[package], SIZE)[4:])


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", ["compressed_fork", "partial_backprop_fork", "pipeline", "spilled"])
def test_the_other_strategies_take_the_same_steps(strategy: str) -> None:
    here, there = (in_processes(one_model, package, strategy) for package in PACKAGES)
    assert here.keys() == there.keys()
    assert all(torch.equal(value, there[name]) for name, value in here.items())


def test_a_process_that_reads_nothing_but_the_pickle_knows_the_class(tmp_path: Path) -> None:
    """As a spawned worker does."""
    (tmp_path / "strategy").write_bytes(pickle.dumps(mirrored.GossipStrategy(topology="ring")))
    script = tmp_path / "script.py"
    script.write_text("import pickle, pathlib; print(pickle.loads(pathlib.Path('strategy').read_bytes()).topology)\n")
    assert Script(script).finish(60) == (0, "Ring()\n")


WITHOUT = """
import importlib.util

import lightning_decentral
assert importlib.util.find_spec("lightning") is None
import pytorch_lightning as pl
from pytorch_lightning.demos.boring_classes import BoringModel

quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = pl.Trainer(**quiet, devices=2, max_steps=2, strategy="gossip_fork", default_root_dir=".")
trainer.fit(BoringModel())
trainer.validate(BoringModel(), ckpt_path=trainer.checkpoint_callback.best_model_path, verbose=False)
print(trainer.strategy)

from lightning_decentral.gossip import Ring
from lightning_decentral.pytorch_lightning import GossipStrategy
assert GossipStrategy(topology="ring").topology == Ring()
try:
    from lightning_decentral import GossipStrategy
except ModuleNotFoundError as error:
    print(error)
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_where_only_pytorch_lightning_is_installed(tmp_path: Path) -> None:
    """An environment that is this one without `lightning`."""
    site = tmp_path / "site"
    site.mkdir()
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if path.name != "lightning" and not path.name.startswith("lightning-2") and path.suffix != ".pth":
            (site / path.name).symlink_to(path)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{site}", "MASTER_PORT": str(ports.free())}
    command = [sys.executable, "-S", "-c", WITHOUT]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    trained, refused = done.stdout.splitlines()[-2:]
    assert trained.startswith("<GossipStrategy for pytorch_lightning.Trainer;")
    assert refused.endswith("write `from lightning_decentral.pytorch_lightning.gossip import GossipStrategy`")


def test_a_misspelt_strategy_is_answered_by_the_one_that_was_meant() -> None:
    assert "gossp" not in StrategyRegistry.available_strategies()
    with pytest.raises(ValueError, match="did you mean 'gossip'"):
        Trainer(strategy="gossp")
