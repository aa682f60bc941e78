"""The scripts at the top of the benchmarks run the modules of the folders of the same name."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from common import entry
from common.paths import BENCHMARKS, ROOT

FOLDERS = sorted(path.parent for path in BENCHMARKS.glob("*/__init__.py") if path.parent.name != "common")


def test_at_most_fifteen_scripts_stand_at_the_top_and_each_folder_has_one() -> None:
    top = {path.stem for path in BENCHMARKS.glob("*.py")}
    assert len(top) <= 15
    assert {folder.name for folder in FOLDERS} <= top


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_readme_names_every_command_of_a_folder(folder: Path) -> None:
    """Commands are the modules whose docstring shows how to call them; each has a `main`."""
    readme = (BENCHMARKS / "README.md").read_text()
    usual = ast.parse((BENCHMARKS / f"{folder.name}.py").read_text()).body[-1].body[0].value.args[1:]  # type: ignore[attr-defined]
    named = usual[0].value if usual else None
    lines = entry.listed(folder.name, named).splitlines()
    assert lines
    for line in lines:
        script, word = line.split()[:2]
        command = script if word.startswith("[") else f"{script} {word}"
        assert f"`{command}" in readme, command
        module = ast.parse(entry.parts(folder.name)[word.strip("[]")].read_text())
        assert "main" in {getattr(node, "name", "") for node in module.body}


def test_without_a_usual_one_it_lists_its_commands_and_a_wrong_word_fails() -> None:
    for words, code in ((), 0), (("sped",), 2):
        script = [sys.executable, str(BENCHMARKS / "network.py"), *words]
        done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, "network.py speed" in done.stdout) == (code, True)


def test_what_cannot_run_ends_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from network import congestion
    from network.cluster import ClusterError

    def fails() -> None:
        raise ClusterError("tc is missing: install iproute2")

    monkeypatch.setattr(congestion, "main", fails)
    monkeypatch.setattr(sys, "argv", ["network.py", "congestion"])
    with pytest.raises(SystemExit, match="error: tc is missing: install iproute2"):
        entry.run("network")
