"""Elastic workers on devices, which are simulated: the rounds are the host's, and all else is as on the host."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.gossip import device_training
from tests.gossip.device_training import CHECK, STEPS
from tests.standing_in import Launching

PATH = {"PYTHONPATH": os.getcwd()}


def trained(folder: Path, *words: str) -> list[list[dict[str, Any]]]:
    """What each worker told, in the order in which they were started."""
    folder.mkdir()
    code, output = Launching(Path(device_training.__file__), (str(folder), *words), PATH).finish(100.0)
    assert code == 0, output[-4000:]
    files = sorted(folder.glob("w*.jsonl"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


@pytest.mark.thorough
@pytest.mark.slow
def test_devices_train_as_hosts_do(tmp_path: Path) -> None:
    """To the bit, by validations of the mean."""
    here, there = trained(tmp_path / "cpu", "cpu"), trained(tmp_path / "device", "simulated")
    assert len(here) == len(there) == 3
    assert all(line["devices"] == ["cuda:0", "cuda:0"] for of in there for line in of if line["kind"] == "step")
    validated = [[line for line in of if line["kind"] == "validated"] for of in (*here, *there)]
    assert [line["step"] for line in validated[0]] == [*range(CHECK, STEPS + 1, CHECK)]
    assert all(of == validated[0] for of in validated)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_newcomer_takes_everything_from_a_device_to_its_own(tmp_path: Path) -> None:
    w0, killed, w2, newcomer = trained(tmp_path / "device", "simulated", "dies")
    assert killed[-1]["step"] == 6
    steps = [line["step"] for line in newcomer if line["kind"] == "step"]
    assert 6 < steps[0] < steps[-1] == STEPS
    last = [[line for line in of if line["kind"] == "validated"][-1] for of in (w0, w2, newcomer)]
    assert last[0]["step"] == STEPS
    assert last[0] == last[1] == last[2]
