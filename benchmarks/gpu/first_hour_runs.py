"""What the first hour runs in processes of its own: marked tests, and workers that train."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import torch

from common.paths import BENCHMARKS, ROOT, command

PORTS = count(30_000 + os.getpid() % 340 * 8)
"""Below those that systems give to connections, and would give away between choice and meeting; eight a process."""


def side_by_side(calls: Sequence[Callable[[], str]]) -> Iterator[str]:
    """Run several calls at the same time; yield their lines in order. Nothing here is timed, and one process leaves
    processors idle."""
    with ThreadPoolExecutor(max_workers=max(1, len(os.sched_getaffinity(0)) // 2)) as pool:
        yield from pool.map(lambda call: call(), calls)


def pytested(where: list[str], mark: str, seconds: int) -> str:
    """Return pytest's last line, the names of failed tests, and of files that need a package which isn't installed.

    Such files hold up nothing. Of those with marked tests only `tests/benchmarks/test_gpu.py` is one: it needs Hydra.
    """
    plugins = ["-p", "no:cacheprovider", "-p", "common.from_checkout"]
    options = [*plugins, "--continue-on-collection-errors", "-rfE", "-m", mark]
    path = os.pathsep.join([str(BENCHMARKS), str(ROOT), os.environ.get("PYTHONPATH", "")])
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *options, *where],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=seconds,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no end in {seconds} s"
    wrong = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    # A file that can't be imported is an error with no test's name; its traceback ends with what is missing.
    missing = {name.partition(".")[0] for name in re.findall(r"^E +ModuleNotFoundError: .*'(.+)'", done.stdout, re.M)}
    failed, files = [name for name in wrong if "::" in name], [name for name in wrong if "::" not in name]
    last = (done.stdout.strip().splitlines() or [done.stderr[-200:]])[-1].strip("= ")
    said = [last, *([": " + ", ".join(failed[:12])] if failed else [])]
    if files:
        wanted = ", ".join(sorted(missing)) or "what they import"
        said.append(f"; not looked at, for want of {wanted}: {len(files)} files")
    return "".join(said)


def trained(
    case: str, device: torch.device, workers: int, backend: str, one_device: bool = False, kill: bool = False
) -> str:
    """ok, or what went wrong, of so many processes that train, save and go on."""
    with tempfile.TemporaryDirectory() as folder:
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(next(PORTS)), "LIGHTNING_DECENTRAL_CACHE": folder,
                  "WORKERS": str(workers)}  # fmt: skip
        words = [*command("gpu", "first_hour_worker"), case, device.type, backend, folder]
        logs = [Path(folder) / f"worker-{rank}.txt" for rank in range(workers)]
        began, ended = time.monotonic(), False
        processes = []
        for rank, log in enumerate(logs):
            place = {"NODE_RANK": str(rank), "LOCAL_RANK": "0", "KILL": str(int(kill))}
            if device.type == "cuda" and not one_device:
                place["CUDA_VISIBLE_DEVICES"] = str(rank)
            environment = {**os.environ, **shared, **place}
            processes.append(subprocess.Popen(words, env=environment, stdout=log.open("w"), stderr=subprocess.STDOUT))
        while time.monotonic() - began < 85 and not ended:
            ended = all(process.poll() is not None for process in processes)
            time.sleep(0.1)
        for process in processes:
            process.kill()
        said = [log.read_text() for log in logs]
    lines = [
        next((line for line in reversed(text.splitlines()) if line.startswith(("ok", "ended"))), "") for text in said
    ]
    if kill:
        return lines[0] if lines[0].startswith("ended") else _last(said[0], ended)
    return (
        f"ok, {time.monotonic() - began:.0f} s: {lines[0]}"
        if all(lines)
        else _last(said[next(rank for rank, line in enumerate(lines) if not line)], ended)
    )


def _last(text: str, ended: bool) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return ("" if ended else "no end in 85 s; ") + (lines[-1][:300] if lines else "said nothing")
