"""The Python blocks of every page run as one script and print what the page says they print.

The page that a newcomer types first runs in a new interpreter, the others in a child of a server that has the package
imported, as their workers do: what they import themselves is looked at in their text.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ports
from tests.docs.pages import PAGES, ROOT, name, promised, script
from tests.fresh import Script
from tests.standing_in import Launching

FIRST = ROOT / "README.md"
UNDER_RAY = ROOT / "docs" / "ray.md"  # tests/processes/test_ray.py runs it, which clears away what Ray leaves
WITH_CODE = [page for page in PAGES if page.exists() and script(page) and page != UNDER_RAY]

FAILS = """
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
import lightning_decentral
class Fails(Callback):
    def on_train_start(self, trainer, pl_module):
        if trainer.global_rank == 1:
            raise ValueError("worker 1 fails")
quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
Trainer(**quiet, devices=2, strategy="gossip", callbacks=[Fails()]).fit(BoringModel())
"""


def run(file: Path, seconds: float) -> tuple[int, str]:
    """Exit status and output; the whole process group is killed when the time is over."""
    process = subprocess.Popen(
        [sys.executable, str(file)],
        cwd=file.parent,
        env={**os.environ, "MASTER_PORT": str(ports.free())},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return 124, f"killed after {seconds} s\n{output}"
    return process.returncode, output


def test_the_pages_have_code_and_promises() -> None:
    assert {"README.md", "docs/index.md", "docs/gossip.md"} <= {name(page) for page in WITH_CODE}
    assert promised("import sys\nif sys:\n    print(1 + 1)  # 2\n") == ["2"]


@pytest.mark.timeout(150)
@pytest.mark.parametrize("page", WITH_CODE, ids=name)
def test_page_runs(page: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.py"
    file.write_text(script(page))
    status, output = run(file, seconds=120) if page == FIRST else Launching(file).finish(seconds=120)
    assert status == 0, output
    missing = [text for text in promised(script(page)) if text not in output]
    assert not missing, f"the page promises {missing}, its code printed:\n{output}"


@pytest.mark.parametrize("page", WITH_CODE, ids=name)
def test_page_registers_the_names_that_it_uses(page: Path) -> None:
    """A strategy's name is known once the package is imported, which the server hides."""
    code = script(page)
    assert re.search(r"^(import|from) lightning_decentral", code, re.MULTILINE) or "strategy=" not in code


def test_a_page_that_hangs_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "page.py"
    file.write_text("import time\ntime.sleep(60)\n")
    assert run(file, seconds=0.5)[0] == 124
    assert Script(file).finish(seconds=0.5)[0] == 124
    assert Launching(file).finish(seconds=0.5)[0] == 124


def test_a_page_whose_worker_fails_fails(tmp_path: Path) -> None:
    file = tmp_path / "page.py"
    file.write_text(FAILS)
    status, output = Launching(file).finish(seconds=60)
    assert status not in (0, 124)
    assert "ValueError: worker 1 fails" in output
