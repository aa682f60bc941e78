"""The first hour on a GPU, as far as a machine without one can go it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from common.paths import BENCHMARKS
from gpu import first_hour
from gpu.first_hour_parts import CASES, PARTS, SHARDED, Row
from gpu.first_hour_runs import pytested, trained
from gpu.first_hour_worker import SMALL, rehearsed

CPU = torch.device("cpu")


def test_without_a_device_it_says_so_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert first_hour.main([], results=tmp_path) == 0
    assert "no CUDA device here" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.sampled
@pytest.mark.parametrize("part", ["facts", "tests", "kernels", "round", "codecs", "spilled"])
def test_a_part_goes_its_way_on_the_host(part: str) -> None:
    rows = list(PARTS[part](CPU))
    assert rows
    assert all(row.line().startswith(row.name) for row in rows)
    if part == "kernels":
        same = [row.value for row in rows if "against torch" in row.name]
        assert same == ["equal bits"] * 5
    if part == "round":
        assert [row.predicted for row in rows[1::2]] == ["under 0.15 a bucket"] * 9


@pytest.mark.thorough
def test_four_workers_are_rehearsed() -> None:
    """Three methods, of which each has its own loss."""
    losses, _ = rehearsed({**SMALL, "n_layer": 1, "n_embd": 16}, "cpu", 10)
    assert len(set(losses)) == 3


ON_A_DEVICE = [pytest.param(case, "cuda", "gloo", marks=pytest.mark.gpu) for case in CASES]
ON_DEVICES = [pytest.param(case, "cuda", "nccl", marks=pytest.mark.multigpu) for case in (*CASES, *SHARDED)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("case", "device", "backend"),
    [("fully_shard", "cpu", "gloo"), *ON_A_DEVICE, *ON_DEVICES],
)
def test_two_workers_train_save_and_go_on(case: str, device: str, backend: str) -> None:
    """With their validation; by gloo on one device together, by NCCL on one each."""
    assert trained(case, torch.device(device), 2, backend, one_device=backend == "gloo").startswith("ok, ")


@pytest.mark.thorough
def test_a_worker_that_fails_says_why() -> None:
    assert trained("no such strategy", CPU, 1, "gloo").endswith("KeyError: 'no such strategy'")


ALONE = """
import builtins, re, sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

def needed(name, found):
    name = re.sub("[-_.]+", "-", name).lower()
    if name in found:
        return
    try:
        words = requires(name) or []
    except PackageNotFoundError:  # of another system
        return
    found.add(name)
    for word in words:
        if "extra ==" not in word:
            needed(re.match("[A-Za-z0-9._-]+", word)[0], found)

found = set()
for name in ("torch", "lightning", "transformers", "torchmetrics", "networkx"):
    needed(name, found)
there = packages_distributions()
absent = {
    top for top, owners in there.items()
    if top not in ("lightning_decentral", "tests") and not {re.sub("[-_.]+", "-", o).lower() for o in owners} & found
}

imported = builtins.__import__

def without(name, globals=None, locals=None, fromlist=(), level=0):
    # Others may look for what isn't theirs, and do without.
    ours = str((globals or {}).get("__file__")).startswith(sys.argv[1]) and "site-packages" not in globals["__file__"]
    if ours and not level and name.partition(".")[0] in absent:
        raise ModuleNotFoundError(f"{globals['__file__']} asks for {name}")
    return imported(name, globals, locals, fromlist, level)

builtins.__import__ = without
assert {"hydra", "pytest", "wandb"} <= absent, absent
import torch
from gpu import first_hour, first_hour_parts, first_hour_worker
for part in ("facts", "kernels", "codecs"):
    assert list(first_hour_parts.PARTS[part](torch.device("cpu")))
print("all there")
"""


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_needs_nothing_but_five_packages_and_what_they_bring() -> None:
    here = BENCHMARKS
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)])}
    command = [sys.executable, "-c", ALONE, str(here.parent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.stdout.splitlines()[-1:] == ["all there"], done.stderr[-3000:]


def test_a_part_that_fails_keeps_its_rows(tmp_path: Path) -> None:
    """And the parts of an earlier call stay on the page."""

    done = {"rows": [Row("before", 1.5, "2")._asdict()], "seconds": 3.0, "error": "RuntimeError: no more"}
    fine = {"rows": [Row("copy, TB/s", 3.1, "3.0")._asdict()], "seconds": 2.0, "error": ""}
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(first_hour, "slug", return_value="a-device"),
        mock.patch.object(first_hour, "description", return_value={"devices": "a device"}),
        mock.patch.object(first_hour, "run", side_effect=[fine, done]),
    ):
        assert first_hour.main(["facts"], results=tmp_path) == 0
        assert first_hour.main(["round"], results=tmp_path) == 1
    page = first_hour.page(json.loads((tmp_path / "first-hour-a-device.json").read_text()))
    assert "| copy, TB/s | 3.1 | 3.0 |" in page
    assert "**RuntimeError: no more**" in page
    assert "| before | 1.5 | 2 |" in page
    assert set(json.loads((tmp_path / "first-hour-a-device.json").read_text())["parts"]) == {"facts", "round"}


def test_a_part_is_a_process_with_a_hard_end(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(first_hour, "SECONDS", 1):
        found = first_hour.run("facts", "cpu")
    assert found["error"] == "stopped after 1 s"
    assert found["seconds"] < 30


@pytest.mark.thorough
def test_what_pytest_says_is_told() -> None:
    assert "1 passed" in pytested(["tests/packaging/test_floors.py::test_folders_are_small_and_names_apart"], "", 100)


@pytest.mark.thorough
def test_a_file_that_asks_for_more_holds_up_no_other(tmp_path: Path) -> None:
    (tmp_path / "test_asks.py").write_text("import no_such_package.deep\n")
    (tmp_path / "test_runs.py").write_text(
        "from lightning_decentral.recipes.gpt import GPT\n\ndef test_it():\n    assert GPT\n"
    )
    said = pytested([str(tmp_path)], "", 100)
    assert "1 passed" in said
    assert said.endswith("; not looked at, for want of no_such_package: 1 files")
