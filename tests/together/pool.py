"""Processes that stay: a run costs neither a fork nor an import, about a tenth of what it would."""

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.trainer.connectors import callback_connector
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_decentral.shared.wire.meeting import notices, rendezvous
from tests import forking, ports, world

WORKERS = 4
MEETING = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LEFT = (*MEETING, "PL_GLOBAL_SEED", "PL_SEED_WORKERS")
PR_SET_PDEATHSIG = 1
DIED = "EOFError: the process ended"
GRACE = 30.0
"""Seconds that the others have after the first worker ended with an error."""


@dataclass(frozen=True)
class Outcome:
    """How one worker ended: with a value, an error ("Type: text"), or, with neither, killed where it waited."""

    value: Any = None
    error: str = ""

    @property
    def hung(self) -> bool:
        return self.value is None and not self.error


class Pool:
    """Forked workers that Lightning takes for processes which somebody else started; killed and forked anew after one
    that hangs."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, function: Callable[..., Any], args: Sequence[Any], workers: int, seconds: float) -> list[Outcome]:
        """[function(*args) of worker 0, of worker 1, ...], within `seconds`, and `GRACE` after a first error."""
        if not self._workers:
            self._fork()
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports.free()), "WORLD_SIZE": str(workers)}
        chosen = [line for _, line in self._workers[:workers]]
        for rank, line in enumerate(chosen):
            line.send(({**meeting, "LOCAL_RANK": str(rank), "NODE_RANK": "0"}, function, tuple(args)))
        outcomes, end = {}, time.monotonic() + seconds
        while len(outcomes) < workers and (left := end - time.monotonic()) > 0:
            open_lines = [line for rank, line in enumerate(chosen) if rank not in outcomes]
            for line in wait(open_lines, left):
                outcomes[chosen.index(line)] = outcome = _received(line)  # type: ignore[arg-type]
                if outcome.value is None:
                    end = min(end, time.monotonic() + GRACE)
        if any(
            not process.is_alive() or (rank < workers and outcomes.get(rank, Outcome(error=DIED)).error == DIED)
            for rank, (process, _) in enumerate(self._workers)
        ):
            self.close()
        return [outcomes.get(rank, Outcome()) for rank in range(workers)]

    def printed(self, rank: int) -> str:
        """The end of what a worker has printed."""
        return (Path(self._folder.name) / f"{rank}.output").read_text(errors="replace")[-3000:]

    def close(self) -> None:
        for process, line in self._workers:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
            line.close()
        self._workers = []

    def _fork(self) -> None:
        assert not world.made, "this process has had a world of threads: it must not fork"
        forking.prepare()
        context = multiprocessing.get_context("fork")
        for rank in range(WORKERS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, Path(self._folder.name) / f"{rank}.output"))
            process.start()
            theirs.close()
            self._workers.append((process, ours))


def _received(line: Connection) -> Outcome:
    try:
        worked, value = line.recv()
    except EOFError:  # it died
        return Outcome(error=DIED)
    return Outcome(value) if worked else Outcome(error=value)


def _serve(line: Connection, output: Path) -> None:
    """Run what comes, for ever; whoever forked this process ends it."""
    os.setsid()  # a group of its own, for the kill
    if sys.platform == "linux":  # a parent that is killed closes no line: the other workers have it, too
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    gc.freeze()
    with output.open("wb") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # Workers of one machine: half of what a run takes would be waits for others that are there.
    rendezvous.LOOK_SECONDS, notices.LINGER_SECONDS = 0.01, 0.5
    callback_connector._load_external_callbacks = lambda group: []  # reads all packages' files, for each Trainer anew
    while True:
        try:
            environment, function, args = line.recv()
        except EOFError:
            os._exit(0)
        os.environ.update(environment)
        try:
            line.send((True, function(*args)))
        except BaseException as error:  # the parent judges it
            line.send((False, f"{_kind(error)}: {error}"))
        _forget()


def _kind(error: BaseException) -> str:
    """Name of its type; of one that nobody raised on purpose, or these tests themselves, none that a refusal has."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    ours = Path(last.filename).parent == Path(__file__).parent
    meant = (last.line or "").startswith("raise") and not ours
    return type(error).__name__ if meant or not isinstance(error, (ValueError, TypeError)) else "AssertionError"


def _forget() -> None:
    """What a run leaves in its process would be found by the next one."""
    for name in LEFT:
        os.environ.pop(name, None)
    rank_zero_only.rank = 0
    rendezvous._met.clear()  # the next run may be at this run's port
    if dist.is_initialized():
        dist.destroy_process_group()
