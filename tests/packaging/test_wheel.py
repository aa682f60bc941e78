"""The wheel carries what the repository has, and works where the repository isn't."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.packaging.project import ROOT

PARTS = {
    "lightning_decentral": "lightning_decentral",
    "conf": "lightning_decentral/conf",
    "recipes": "lightning_decentral/recipes",
    "hydra_plugins": "hydra_plugins",
}
SUFFIXES = {".py", ".yaml", ".typed", ".json"}

COMPOSE = """
import lightning_decentral
from hydra import compose, initialize_config_dir, initialize_config_module

with initialize_config_module("lightning_decentral.conf", version_base="1.3"):
    print("own", compose("train", overrides=["strategy=gossip", "strategy/topology=ring"]).strategy.topology._target_)
with initialize_config_dir({here!r}, version_base="1.3"):
    print("reused", compose("mine").strategy._target_)
print("from", lightning_decentral.__file__)
"""

COMMANDS = """
import runpy, sys

for words in ("lightning-decentral-train --cfg job strategy=gossip", "lightning-decentral topology ring --workers 4"):
    name, *sys.argv[1:] = words.split()
    sys.argv[0] = {folder!r} + "/" + name
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        assert not ended.code, ended
"""

APPLICATION = """
import sys

import hydra

@hydra.main(version_base="1.3", config_path=".", config_name="conf")
def main(cfg):
    from lightning.pytorch.trainer.connectors import callback_connector

    found = callback_connector._load_external_callbacks("lightning.pytorch.callbacks_factory")
    print("callbacks:", [type(callback).__name__ for callback in found])

from hydra.core.plugins import Plugins
Plugins.instance()
print("torch before the launch:", "torch" in sys.modules)
main()
"""

MINE = """
defaults:
  - strategy: gossip
  - _self_
hydra:
  searchpath: [pkg://lightning_decentral.conf]
"""


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that the build leaves nothing in the repository."""
    source = tmp_path_factory.mktemp("source")
    for folder in PARTS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", source / "dist", cwd=source)
    (built,) = (source / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel. Its dependencies are read from this one: a plain path in a .pth file is put on
    sys.path without running the .pth files in there, so the editable install of the repository stays unseen."""
    home = tmp_path_factory.mktemp("clean")
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel, cwd=home)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return home


def test_the_wheel_carries_every_file(wheel: Path) -> None:
    expected = {
        f"{inside}/{path.relative_to(ROOT / folder)}"
        for folder, inside in PARTS.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SUFFIXES
    }
    carried = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert carried == expected
    assert "lightning_decentral/py.typed" in carried


@pytest.mark.timeout(240)
def test_configurations_compose_and_the_console_commands_run_elsewhere(clean: Path, tmp_path: Path) -> None:
    """All in one new process, which has torch and Lightning to import."""
    (tmp_path / "mine.yaml").write_text(MINE)
    script = COMPOSE.format(here=str(tmp_path)) + COMMANDS.format(folder=str(clean / "bin"))
    output = run(clean / "bin" / "python", "-c", script, cwd=tmp_path)
    said = dict(
        line.split(" ", 1) for line in output.splitlines() if line.split(" ", 1)[0] in ("own", "reused", "from")
    )
    assert said["own"] == "lightning_decentral.gossip.Ring"
    assert said["reused"] == "lightning_decentral.GossipStrategy"
    assert Path(said["from"]).is_relative_to(clean)
    assert "_target_: lightning_decentral.GossipStrategy" in output
    assert "period: 1 step" in output
    for name in ("lightning-decentral-train", "lightning-decentral"):
        command = clean / "bin" / name
        assert command.read_text().splitlines()[0] == f"#!{clean / 'bin' / 'python'}"
        assert os.access(command, os.X_OK)


@pytest.mark.thorough
@pytest.mark.timeout(240)
def test_the_launcher_and_its_gate_are_found_elsewhere(clean: Path, tmp_path: Path) -> None:
    """Hydra finds the plugin, without torch; Lightning the entry point, in a sweep that runs."""
    (tmp_path / "conf.yaml").write_text("lr: 1\n")
    (tmp_path / "application.py").write_text(APPLICATION)
    words = ["-m", "hydra/launcher=shard_parallel", "lr=1,2", "hydra.sweep.dir=sweep"]
    output = run(clean / "bin" / "python", "application.py", *words, cwd=tmp_path)
    assert "torch before the launch: False" in output
    logs = [(tmp_path / "sweep" / name / "member.log").read_text() for name in "01"]
    assert [log.splitlines()[-1] for log in logs] == ["callbacks: ['Gate']"] * 2


@pytest.mark.thorough
def test_an_editable_install_has_the_launcher_too(tmp_path: Path) -> None:
    """Hydra walks through the folders of hydra_plugins, which an editable install must therefore name."""
    venv.create(tmp_path / "venv", with_pip=False)
    python, source = tmp_path / "venv" / "bin" / "python", tmp_path / "source"
    (site,) = tmp_path.glob("venv/lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")  # setuptools
    for folder in PARTS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    words = ("install", "-q", "--no-deps", "--no-index", "--no-build-isolation", "-e", source)
    run(sys.executable, "-m", "pip", "--python", python, *words, cwd=tmp_path)
    walk = "import hydra_plugins as h, pkgutil as p; print([m.name for m in p.iter_modules(h.__path__)])"
    assert "shard_parallel" in run(python, "-I", "-c", walk, cwd=tmp_path)
