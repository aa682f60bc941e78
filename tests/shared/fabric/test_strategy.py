"""The names that Fabric of either package knows, and what it refuses."""

import pickle
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning.fabric
import lightning_fabric
import pytest
import torch

from lightning_decentral import GossipStrategy
from tests import ports
from tests.loops import Loop, equal, run
from tests.tiny import in_processes

PACKAGES = {
    "lightning_decentral": lightning.fabric.Fabric,
    "lightning_decentral.pytorch_lightning": lightning_fabric.Fabric,
}
CLASSES = {
    "gossip": "gossip.FabricGossipStrategy",
    "compressed": "compressed.FabricCompressedStrategy",
    "partial_backprop": "partial.FabricPartialBackpropStrategy",
}
ports.use("lightning_fabric")


def found(package: str, name: str) -> type:
    folder, kind = CLASSES[name].split(".")
    return getattr(import_module(f"{package}.{folder}"), kind)


@pytest.mark.parametrize("ending", ["", "_fork", "_spawn"])
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("package", PACKAGES)
def test_both_know_the_names(package: str, name: str, ending: str) -> None:
    strategy = PACKAGES[package](accelerator="cpu", devices=2, strategy=name + ending).strategy
    assert type(strategy) is found(package, name)
    assert strategy._start_method == {"": "popen", "_fork": "fork", "_spawn": "spawn"}[ending]


@pytest.mark.parametrize("name", ["spilled", "token_pipeline"])
def test_what_needs_a_trainer_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(
        ValueError, match=rf"{name} doesn't work with Fabric: .*; use a Trainer, or compressed or gossip or partial"
    ):
        lightning.fabric.Fabric(accelerator="cpu", devices=2, strategy=name)


def test_a_trainers_strategy_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"GossipStrategy for lightning\.pytorch\.Trainer") as refused:
        lightning.fabric.Fabric(accelerator="cpu", devices=2, strategy=GossipStrategy())
    assert "\n" not in str(refused.value)


def _other(folder: Path, loop: Loop) -> None:
    lightning_fabric.Fabric(accelerator="cpu", devices=3, strategy="gossip_fork").launch(loop, folder)


def test_both_take_the_same_steps(tmp_path: Path) -> None:
    ours: list[Any] = run(tmp_path, "gossip_fork", Loop())
    in_processes(_other, tmp_path, Loop())
    assert all(equal(row["rows"], torch.load(tmp_path / f"{rank}.pt")["rows"]) for rank, row in enumerate(ours))


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("name", CLASSES)
def test_a_spawned_process_gets_the_strategy_whole(package: str, name: str) -> None:
    strategy = found(package, name)()
    again = pickle.loads(pickle.dumps(strategy))
    assert type(again) is type(strategy)
    assert vars(again).keys() == vars(strategy).keys()
    assert again.health._strategy is again._checkpoints._worker is again
