"""One text, two sets of classes: what is renamed and what is not, and the names that a Trainer of either finds."""

import ast
import inspect
import pickle
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning

import lightning_decentral
import lightning_decentral.gossip
import lightning_decentral.pytorch_lightning as mirrored
from lightning_decentral.gossip import Ring
from lightning_decentral.pytorch_lightning import mirror
from tests.packaging.test_floors import MODULES, dotted
from tests.tiny import QUIET

HERE = "lightning_decentral.pytorch_lightning"
TRAINERS = {"lightning_decentral": lightning.pytorch.Trainer, HERE: pytorch_lightning.Trainer}


@pytest.mark.parametrize(("said", "meant"), [
    ("lightning.pytorch", "pytorch_lightning"),
    ("lightning.pytorch.callbacks", "pytorch_lightning.callbacks"),
    ("lightning.fabric.plugins", "lightning_fabric.plugins"),
    ("lightning.pytorches", "lightning.pytorches"),
    ("lightning_utilities", "lightning_utilities"),
    ("lightning_decentral", "lightning_decentral"),
    ("lightning_decentral.optim", "lightning_decentral.optim"),
    ("lightning_decentral.gossip", f"{HERE}.gossip"),
    ("lightning_decentral.gossip.strategy", f"{HERE}.gossip.strategy"),
    ("lightning_decentral.shared.checkpoint.checkpoints", f"{HERE}.shared.checkpoint.checkpoints"),
    ("lightning_decentral.gossip.wire.mixer", "lightning_decentral.gossip.wire.mixer"),
    ("lightning_decentral.shared.plan.kinds", "lightning_decentral.shared.plan.kinds"),
])  # fmt: skip
def test_what_a_mirrored_module_imports(said: str, meant: str) -> None:
    assert mirror.renamed(said) == meant


def imports(source: str) -> set[str]:
    nodes = list(ast.walk(ast.parse(source)))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}


def of_methods(path: Path) -> bool:
    return dotted(path).split(".")[1] in mirror.METHODS


@pytest.mark.parametrize("path", [p for p in MODULES if of_methods(p) and "lightning." in p.read_text()], ids=dotted)
def test_every_import_is_renamed_and_nothing_else(path: Path) -> None:
    """As the syntax tree says, not the pattern that renames: an import in a form that it doesn't know would be left."""
    loader = mirror.Renaming("any", str(path))
    before, after = path.read_text(), loader.get_source("any")
    assert {mirror.renamed(name) for name in imports(before)} == imports(after)
    assert not {name for name in imports(after) if name.partition(".")[0] == "lightning"}
    assert len(before.splitlines()) == len(after.splitlines())


@pytest.mark.parametrize("name", list(lightning_decentral.STRATEGIES))
def test_two_classes_of_one_text(name: str) -> None:
    ours, theirs = getattr(lightning_decentral, name), getattr(mirrored, name)
    assert ours is not theirs
    assert issubclass(ours, lightning.pytorch.strategies.Strategy)
    assert issubclass(theirs, pytorch_lightning.strategies.Strategy)
    assert inspect.getsourcefile(ours) == inspect.getsourcefile(theirs)
    assert inspect.getsource(ours) == inspect.getsource(theirs)
    assert theirs.__module__ == ours.__module__.replace("lightning_decentral", HERE)


def test_what_knows_no_lightning_is_one() -> None:
    there = import_module(f"{HERE}.gossip")
    assert there.Ring is Ring
    assert there.__all__ == lightning_decentral.gossip.__all__
    assert issubclass(there.ConsensusMonitor, pytorch_lightning.Callback)
    assert mirrored.GossipStrategy(topology="ring").topology == Ring()


@pytest.mark.parametrize("module", ["gossip.wire", "cli", "gossip.nothing", "sweep"])
def test_what_is_not_mirrored_is_not_there(module: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=f"No module named '{HERE}.{module}"):
        import_module(f"{HERE}.{module}")


def test_the_files_own_compiled_code_is_left(tmp_path: Path) -> None:
    file = tmp_path / "binding.py"
    file.write_text("from lightning.pytorch import Trainer\n")
    mirror.Renaming("binding", str(file)).get_code("binding")
    assert [path.name for path in tmp_path.iterdir()] == ["binding.py"]


@pytest.mark.parametrize("package", TRAINERS)
@pytest.mark.parametrize("name", [*lightning_decentral.NAMES, "gossip_fork", "gossip_spawn", "spilled"])
def test_both_trainers_know_the_names(package: str, name: str) -> None:
    strategy = TRAINERS[package](**QUIET, devices=1 if name == "spilled" else 2, strategy=name).strategy
    assert type(strategy).__module__.startswith(f"{package}.")
    assert type(strategy) is getattr(import_module(package), type(strategy).__name__)


@pytest.mark.parametrize("package", TRAINERS)
def test_a_class_by_its_path(package: str) -> None:
    strategy = TRAINERS[package](**QUIET, devices=2, strategy=f"{package}.GossipStrategy").strategy
    assert type(strategy) is import_module(package).GossipStrategy


@pytest.mark.parametrize("package", TRAINERS)
@pytest.mark.parametrize("name", list(lightning_decentral.STRATEGIES))
def test_a_strategy_of_the_other_package_is_refused_in_one_line(package: str, name: str) -> None:
    (other,) = set(TRAINERS) - {package}
    with pytest.raises(ValueError, match=rf"{type_of(package)}.Trainer takes {package}.{name}>") as refused:
        TRAINERS[package](**QUIET, devices=1, strategy=getattr(import_module(other), name)())
    assert "\n" not in str(refused.value)


def type_of(package: str) -> str:
    return TRAINERS[package].__module__.removesuffix(".trainer.trainer")


def test_a_mirrored_strategy_is_pickled_under_its_own_name() -> None:
    strategy: Any = mirrored.GossipStrategy(topology=Ring())
    again = pickle.loads(pickle.dumps(strategy))
    assert type(again) is mirrored.GossipStrategy
    assert again.topology == Ring()
