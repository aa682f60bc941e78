"""The tutorial's notebook runs, and the page shows what it printed and drew."""

import os
import subprocess
import sys

import pytest
import tutorial

from tests import ports
from tests.docs.pages import ROOT

NOTEBOOK = tutorial.read()
NAMES = ["ddp", "gossip, int8", "compressed, int8", "outer rounds, int4"]


def test_the_page_shows_the_notebooks_outputs() -> None:
    assert tutorial.PAGE.filled(tutorial.generated(NOTEBOOK)) == tutorial.PAGE.file.read_text()
    assert tutorial.image(NOTEBOOK) == tutorial.PICTURE.read_bytes()


def test_it_has_outputs_and_says_what_is_simulated() -> None:
    assert len(tutorial.printed(NOTEBOOK)) >= 5
    assert "links simulated" in tutorial.printed(NOTEBOOK)[-1]
    assert "**The network is simulated**" in NOTEBOOK_TEXT
    assert "**Links are simulated**" in tutorial.PAGE.file.read_text()


NOTEBOOK_TEXT = "".join(line for cell in NOTEBOOK["cells"] for line in cell["source"])


def seconds() -> dict[str, list[float]]:
    """Of the table that it prints last, by method: the slowest link first."""
    lines = tutorial.printed(NOTEBOOK)[-1].splitlines()[2:]
    return {line[:18].strip(): [float(cell) for cell in line[18:].split()] for line in lines}


def test_its_sentences_are_those_of_its_numbers() -> None:
    found = seconds()
    assert list(found) == NAMES
    slowest, fastest = ({name: row[at] for name, row in found.items()} for at in (0, -1))
    assert sorted(slowest, key=slowest.__getitem__) == [NAMES[3], NAMES[1], NAMES[2], NAMES[0]]
    assert max(fastest.values()) < 2 * min(fastest.values())
    sent = [line.split() for line in tutorial.printed(NOTEBOOK)[-2].splitlines()]
    assert 55 < float(sent[0][-4]) / float(sent[-1][-4]) < 65


@pytest.mark.timeout(150)
def test_it_runs_with_few_steps() -> None:
    environment = {**os.environ, "TUTORIAL_STEPS": "24", "MASTER_PORT": str(ports.free())}
    command = [sys.executable, "docs/scripts/tutorial.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=140)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"\n{name:18s}" in done.stdout for name in NAMES)


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_it_runs_whole() -> None:
    command = [sys.executable, "docs/scripts/tutorial.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = [text.splitlines() for text in tutorial.printed(NOTEBOOK)]
    assert printed[0][0] in done.stdout
