"""The scripts of docs/examples run, each at its smallest size; those that are a guide's own are run with it.

What shell and sbatch start is caught, and the workers run in processes that have the package imported.
"""

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import examples
import pytest

from tests import ports
from tests.docs.pages import ROOT
from tests.elastic.wire.lobbies import LobbyProcess
from tests.fresh import Script

EXAMPLES = ROOT / "docs" / "examples"
PAGE = (ROOT / "docs" / "examples.md").read_text()
ON_PATH = """#!/bin/sh
while [ "${1#*.py}" = "$1" ]; do shift; done
printf '%s\\0' "$@" > "$CAUGHT/words"
env -0 > "$CAUGHT/environment"
"""


def caught(
    folder: Path, command: list[str], stands_in: str, given: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """(words from the script on, environment) with which a shell script calls what `stands_in` takes the place of."""
    program = folder / stands_in
    program.write_text(ON_PATH)
    program.chmod(0o755)
    path = {"PATH": f"{folder}:{os.environ['PATH']}", "CAUGHT": str(folder)}
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, **path, **given}, timeout=20)
    words, lines = ((folder / name).read_text().rstrip("\0").split("\0") for name in ("words", "environment"))
    return words, dict(line.split("=", 1) for line in lines)


def finish(scripts: list[Script]) -> str:
    ended = [script.finish(60) for script in scripts]
    output = "\n".join(printed for _, printed in ended)
    assert [code for code, _ in ended] == [0] * len(scripts), output
    return output


def test_the_page_names_every_example() -> None:
    files = {path.name for path in EXAMPLES.iterdir() if path.is_file()}
    assert set(re.findall(r"\]\(examples/([\w.]+)\)", PAGE)) == files


@pytest.mark.parametrize("name", examples.PAGES)
def test_the_script_of_a_guide_is_the_page_s(name: str) -> None:
    """Which test_python_blocks.py runs."""
    written = (EXAMPLES / f"{name}.py").read_text()
    assert written == examples.text(name), "python docs/scripts/examples.py --write"


def test_a_laptop(tmp_path: Path) -> None:
    assert "workers: 2" in finish([Script(EXAMPLES / "laptop.py", folder=tmp_path)])


def test_two_machines(tmp_path: Path) -> None:
    scripts = []
    for rank in "01":
        command = ["sh", "docs/examples/two_machines.sh", rank, "127.0.0.1", "lo", "--steps=16"]
        words, environment = caught(tmp_path, command, "python", {})
        assert words[0] == "docs/examples/hosts.py"
        assert environment["NODE_RANK"] == rank
        scripts.append((words[1:], environment))
    port = str(ports.free())
    running = [
        Script(EXAMPLES / "hosts.py", tuple(words), {**environment, "MASTER_PORT": port, "LOCAL_RANK": "0"})
        for words, environment in scripts
    ]
    assert "2 workers, accuracy 0." in finish(running)


def test_a_slurm_job(tmp_path: Path) -> None:
    """The tasks that srun would start, two on one host in the place of four GPUs on each of two."""
    text = (EXAMPLES / "slurm.sbatch").read_text()
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.MULTILINE))
    assert asked["ntasks-per-node"] == asked["gpus-per-node"]
    given = {
        "SLURM_NNODES": "1",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_JOB_NAME": "gossip",
        "SLURM_JOB_ID": "1",
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "127.0.0.1",
    }
    command = ["bash", "docs/examples/slurm.sbatch", "--accelerator=cpu", "--steps=16"]
    words, environment = caught(tmp_path, command, "srun", given)
    assert words[0] == "docs/examples/hosts.py"
    place = {**environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports.free())}
    tasks = [
        Script(EXAMPLES / "hosts.py", tuple(words[1:]), {**place, "SLURM_PROCID": rank, "SLURM_LOCALID": rank})
        for rank in "01"
    ]
    assert "2 workers, accuracy 0." in finish(tasks)


def test_workers_that_come_and_go(tmp_path: Path) -> None:
    with LobbyProcess(least=1, most=1) as lobby:
        words = (lobby.place, "--least=1", "--most=1", "--steps=8")
        assert "step 8, accuracy" in finish([Script(EXAMPLES / "elastic.py", words, folder=tmp_path)])


def test_a_sweep(tmp_path: Path) -> None:
    words = ("-m", "lr=0.1,0.01", "steps=4", "hydra/launcher=shard_parallel", "hydra.launcher.devices=2")
    output = finish([Script(EXAMPLES / "sweep.py", words, folder=tmp_path)])
    printed = "\n".join(path.read_text() for path in tmp_path.rglob("*.log")) + output
    assert len(list((tmp_path / "multirun").rglob(".hydra"))) == 2, printed
