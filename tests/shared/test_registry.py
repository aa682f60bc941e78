"""Names are entered in a registry whether it is imported before or after, and importing it stays what it was."""

import subprocess
import sys
from importlib import import_module, reload
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from lightning_decentral.shared import registry
from tests.packaging.project import ROOT


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "a_registry_of_tests.py").write_text("NAMES = ['ddp']\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, "a_registry_of_tests", raising=False)
    return "a_registry_of_tests"


def enter(module: ModuleType) -> None:
    module.NAMES.append("gossip")


def test_before_and_after(module: str) -> None:
    registry.when_imported({module: enter})
    assert module not in sys.modules
    there = import_module(module)
    assert there.NAMES == ["ddp", "gossip"]
    registry.when_imported({module: enter})
    assert there.NAMES == ["ddp", "gossip", "gossip"], "it is imported already: at once"


def test_looking_for_a_module_enters_nothing_and_loses_nothing(module: str) -> None:
    registry.when_imported({module: enter})
    assert find_spec(module) is not None
    assert import_module(module).NAMES == ["ddp", "gossip"]
    assert reload(sys.modules[module]).NAMES == ["ddp", "gossip"]


def test_a_module_that_is_not_there_is_not_found(module: str) -> None:
    registry.when_imported({"no_registry_of_tests": enter})
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_registry_of_tests'"):
        import_module("no_registry_of_tests")


def test_there_is_one_finder_however_often_it_is_asked(module: str) -> None:
    registry.when_imported({module: enter})
    registry.when_imported({module: enter})
    assert len([finder for finder in sys.meta_path if isinstance(finder, registry.AfterImport)]) == 1
    assert import_module(module).NAMES == ["ddp", "gossip"]


def test_importing_the_package_reads_neither_lightning_nor_torch() -> None:
    told = "import sys, lightning_decentral; print({'torch', 'lightning', 'pytorch_lightning'} & sys.modules.keys())"
    command = [sys.executable, "-c", told]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"
