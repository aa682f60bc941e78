"""Under a real Ray, on CPUs: Ray Train's losses are torchrun's, its storage resumes, Ray starts actors again.

Each test starts one Ray of its own, in a process group that is killed when the time is over.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed.run

from tests.docs.pages import promised, script
from tests.processes import ray_training
from tests.processes.ray_training import SIZE, STRATEGIES
from tests.standing_in import Launching

pytestmark = [
    *(pytest.mark.thorough, pytest.mark.slow, pytest.mark.timeout(1200)),
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray"),
]

ROOT = Path(__file__).parents[2]
RAYS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "CUDA_VISIBLE_DEVICES": ""}


@contextmanager
def started(*words: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A Ray's driver. Afterwards nothing is left of it: neither its workers, nor the daemons that it has started."""
    everything = {**os.environ, **RAYS, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **environment}
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env=everything,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    own = psutil.Process(process.pid)
    family: list[psutil.Process] = []
    try:
        yield process
    finally:
        with suppress(psutil.NoSuchProcess):
            family = [own, *own.children(recursive=True)]
        for one in family:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait(20)


def finished(*words: str, seconds: float = 900, **environment: str) -> str:
    with started(*words, **environment) as driver:
        try:
            output, _ = driver.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(driver.pid, signal.SIGKILL)
            pytest.fail(f"killed after {seconds} s\n{driver.communicate()[0][-8000:]}")
    assert driver.returncode == 0, output[-8000:]
    return output


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(one["state"][key], other["state"][key]) for key in one["state"])


def test_losses_are_torchrun_s_and_ray_s_storage_resumes(tmp_path: Path) -> None:
    (folder := tmp_path / "ray").mkdir()
    (folder / "alone").mkdir()
    (reference := tmp_path / "torchrun").mkdir()
    words = ("--standalone", "--nproc-per-node=2", str(Path(ray_training.__file__)), str(reference))
    torchrun = Launching(Path(torch.distributed.run.__file__), words, {"PYTHONPATH": str(ROOT)}, ROOT)
    code, printed = torchrun.finish(200)
    assert code == 0, printed[-4000:]
    output = finished("-m", "tests.processes.ray_training", str(folder))
    load = lambda path: torch.load(path, weights_only=True)  # noqa: E731
    for name, rank in [(name, rank) for name in STRATEGIES for rank in range(SIZE)]:
        ours, theirs = load(folder / f"{name}-{rank}.pt"), load(reference / f"{name}-{rank}.pt")
        assert ours["losses"] == theirs["losses"], name
        assert same(ours, theirs), name
    ours, theirs = load(folder / "spilled-0.pt"), load(folder / "alone" / "spilled-0.pt")
    assert ours["losses"] == theirs["losses"]
    # One that was killed: all go on from Ray's storage, each from its own state.
    assert int((folder / "killed").read_text()) > 0
    for rank in range(SIZE):
        ours, theirs = load(folder / f"restarted-{rank}.pt"), load(reference / f"gossip-{rank}.pt")
        assert ours["losses"] == theirs["losses"][-len(ours["losses"]) :]
        assert 0 < len(ours["losses"]) < len(theirs["losses"])
        assert same(ours, theirs)
        assert "this process group has 2 workers and restarts all" in (folder / f"elastic-{rank}").read_text()
    kept = re.search(r"metrics \[(.*)\] in (.*)", output)
    assert kept, output[-4000:]
    assert "'train/epoch_loss'" in kept[1]
    states = {path.name.partition(".")[0] for path in Path(kept[2].strip()).glob(".workers/checkpoint/*.state")}
    assert states == {f"worker-{rank}-of-{SIZE}" for rank in range(SIZE)}


def test_the_page_s_script() -> None:
    written, output = script(ROOT / "docs" / "ray.md"), finished("docs/examples/ray_train.py")
    assert promised(written) == output.split()[-1:], output[-4000:]


def test_ray_tune_over_trainings() -> None:
    assert re.search(r"best lr 0.1: loss 0\.\d+", finished("docs/examples/ray_tune.py", "--num-cpus=4"))


def test_a_lost_actor_joins_again_and_no_other_restarts() -> None:
    step, seen, killed = re.compile(r"\(Worker pid=(\d+)[^)]*\)\S* step (\d+), "), dict[int, list[int]](), 0
    with started(
        "docs/examples/ray_elastic.py", "--workers=3", "--steps=1000000", "--num-cpus=4", RAY_DEDUP_LOGS="0"
    ) as driver:
        end, output = time.monotonic() + 400, ""
        assert driver.stdout is not None
        for line in driver.stdout:
            output += line
            if found := step.search(line):
                seen.setdefault(int(found[1]), []).append(int(found[2]))
            if not killed and len(seen) == 3 and all(len(steps) > 1 for steps in seen.values()):
                killed = max(seen)
                os.kill(killed, signal.SIGKILL)
            newcomers = [steps for pid, steps in seen.items() if pid != killed] if len(seen) > 3 else []
            if time.monotonic() > end or (newcomers and all(max(s) > newcomers[-1][0] for s in newcomers)):
                break
    assert len(seen) == 4, output[-8000:]
    *_, (_, joined) = seen.items()
    assert joined[0] > 0, "it began anew"
    for pid, steps in seen.items():
        assert steps == list(range(steps[0], steps[-1] + 1, 100)), f"{pid} {steps}"
