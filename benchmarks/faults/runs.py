"""Runs of several workers as processes, each with a hard kill, and sentences on how they ended."""

import gc
import json
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from faults.worker import Fault, Worker, lead, meeting

GOES_ON, LINE, TRACEBACK, HANGS, CORRUPT = "goes on", "one line", "TRACEBACK", "HANGS", "CORRUPT"
BAD = (TRACEBACK, HANGS, CORRUPT)
FAR = 10.0  # of a parameter of these models, whose initial values are below one

# Errors of a transport itself, instead of this package's or before them.
RAW = (
    r"\.(?:cc|cpp|h):\d+|Exception raised from|^\[[^]]*/[^]]*\]|^Connection (?:closed|reset)|^Broken pipe|^wait timeout"
)


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run, one of the five, and the line that was printed."""

    kind: str
    said: str = ""


@dataclass
class Process:
    """One forked process; `ended` is None while it runs."""

    pid: int
    record: Path
    output: Path
    status: int | None = None

    def poll(self) -> bool:
        """Return whether it has ended."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status is not None

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if self.status is None:
            os.waitpid(self.pid, 0)

    @property
    def said(self) -> dict[str, Any]:
        """Its record; one that it couldn't write names the signal."""
        if self.record.exists() and self.record.stat().st_size:
            found: dict[str, Any] = json.loads(self.record.read_text())
            return found
        lines = [line for line in self.printed.splitlines() if line.strip()]
        left = {"kind": "finished" if self.status == 0 else "died", "status": self.status}
        return {**left, "text": lines[-1] if lines else ""}

    @property
    def printed(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""


@dataclass
class Run:
    """Workers that run at the same time.

    Args:
        seconds: after so long whoever still runs hangs.
    """

    folder: Path
    seconds: float
    processes: list[Process] = field(default_factory=list)
    late: list[int] = field(default_factory=list)

    def start(self, work: Callable[[], None], variables: dict[str, str]) -> Process:
        name = self.folder / f"worker-{len(self.processes)}"
        name.parent.mkdir(parents=True, exist_ok=True)
        process = Process(0, name.with_suffix(".json"), name.with_suffix(".log"))
        process.record.unlink(missing_ok=True)  # an earlier run's
        gc.freeze()  # a collection in the child would copy all that it shares
        process.pid = os.fork()
        if process.pid == 0:
            lead(work, process.record, process.output, variables)
        self.processes.append(process)
        return process

    def wait(self, victims: Sequence[int] = (), aside: Callable[[float], None] = lambda now: None) -> None:
        """Wait until all but the victims have ended, or the time is over; then kill all that are left.

        Args:
            aside: called again and again meanwhile.
        """
        began = time.monotonic()
        counted = [(i, process) for i, process in enumerate(self.processes) if i not in victims]
        while time.monotonic() - began < self.seconds:
            ended = [process.poll() for _, process in counted]
            if all(ended):
                break
            aside(time.monotonic() - began)
            time.sleep(0.02)
        self.late = [i for i, process in counted if process.status is None]
        for process in self.processes:
            process.kill()

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        """Wait for the condition; return whether it came true in time."""
        until = time.monotonic() + self.seconds
        while time.monotonic() < until and not condition():
            time.sleep(0.02)
        return condition()


def train(
    folder: Path,
    port: int,
    seconds: float,
    method: str = "gossip",
    size: int = 2,
    faults: Sequence[Fault] = (),
    resume: Path | None = None,
) -> Run:
    """A started training."""
    run = Run(folder, seconds)
    for rank in range(size):
        worker = Worker(method, rank, size, folder / "checkpoints", resume=None if resume is None else str(resume))
        run.start(lambda worker=worker: disturbed(worker, faults), meeting(rank, size, port))  # type: ignore[misc]
    return run


def disturbed(worker: Worker, faults: Sequence[Fault]) -> None:
    worker.folder.mkdir(parents=True, exist_ok=True)
    for fault in faults:
        fault(worker)
    worker.train()


def judged(run: Run, victims: Sequence[int], check: Callable[[], str | None]) -> Outcome:
    """The worst of what became of the workers that nothing was done to; `check` says what is wrong with a result."""
    if run.late:
        return Outcome(HANGS, f"worker {', '.join(map(str, run.late))} still waits after {run.seconds:.0f} s")
    records = [process.said for i, process in enumerate(run.processes) if i not in victims]
    lines = []
    for said in records:
        if said["kind"] == "finished":
            continue
        text = said["text"].strip()
        if said["kind"] == "died":
            return Outcome(TRACEBACK, f"ended with {said['status']}: {_short(text)}")
        named = f"{said['type']}: {_short(text)}"
        if not said["meant"] or "\n" in text or re.search(RAW, text):
            return Outcome(TRACEBACK, named)
        lines.append(named)
    if lines:
        return Outcome(LINE, next((line for line in lines if line.startswith("PeerLost")), lines[-1]))
    wrong = check()
    return Outcome(CORRUPT, wrong) if wrong else Outcome(GOES_ON)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:297] + "..."


# ---- results ---------------------------------------------------------------------------------------------------------


def result(folder: Path) -> dict[str, Tensor]:
    """The mean model as the newest checkpoint of this run has it: a resumed one's is last-v1.ckpt."""
    newest = max((folder / "checkpoints").glob("last*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    state: dict[str, Tensor] = torch.load(newest, weights_only=True)["state_dict"]
    return state


def unsound(folder: Path) -> str | None:
    """Return what is wrong with the numbers of a run that ended well."""
    for file in [*sorted((folder / "checkpoints").glob("*.ckpt")), *sorted(folder.rglob("handed-back-*.pt"))]:
        loaded = torch.load(file, weights_only=True)
        for name, tensor in loaded.get("state_dict", loaded).items():
            if not torch.isfinite(tensor.double()).all():
                return f"{name} in {file.name} isn't finite"
            if tensor.double().abs().max() > FAR and tensor.is_floating_point():
                return f"{name} in {file.name} is {tensor.double().abs().max():.1e}"
    return None


def differs(folder: Path, other: Path) -> str | None:
    """The first number by which two runs' results differ."""
    mine, theirs = result(folder), result(other)
    names = [name for name in theirs if not torch.equal(mine[name], theirs[name])]
    return f"{names[0]} isn't that of the undisturbed run" if names else None
