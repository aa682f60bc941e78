"""Workers that nobody watches over: no launcher ends them all when one has ended, as on several machines."""

import multiprocessing
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import forking, ports, tiny, world


@dataclass(frozen=True)
class Outcome:
    """How one worker ended."""

    value: Any
    error: str
    """Type: text; empty for one that returned."""
    output: str
    seconds: float

    @property
    def killed(self) -> bool:
        return self.value is None and not self.error


def crew(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    seconds: float = 150.0,
    environment: Mapping[str, str] | None = None,
    own: Mapping[int, Mapping[str, str]] | None = None,
    absent: tuple[int, ...] = (),
) -> list[Outcome]:
    """function(*args) in `size` forked processes that Lightning takes for workers which somebody else started.

    Args:
        own: a worker's own variables.
        absent: workers that are never started.
    """
    assert not world.made, "this process has had a world of threads: mark the test that made it with threads"
    forking.prepare()
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports.free()), "WORLD_SIZE": str(size), "NODE_RANK": "0"}
    with tempfile.TemporaryDirectory() as folder:
        places = [(Path(folder) / f"{rank}.result", Path(folder) / f"{rank}.output") for rank in range(size)]
        began, processes = time.monotonic(), {}
        for rank in set(range(size)) - set(absent):
            words = {**meeting, "LOCAL_RANK": str(rank), **(environment or {}), **(own or {}).get(rank, {})}
            task = multiprocessing.get_context("fork").Process(
                target=tiny.child, args=(_worker, (words, function, args), *places[rank])
            )
            task.start()
            processes[rank] = task
        ends = _join(processes, began, seconds)
        return [_outcome(*place, ends.get(rank, 0.0)) for rank, place in enumerate(places)]


def by_itself() -> int:
    """In a worker: its rank, which it forgets, as elastic workers have none."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "NODE_RANK"):
        os.environ.pop(name)
    return int(os.environ.pop("LOCAL_RANK"))


def _join(processes: dict[int, Any], began: float, seconds: float) -> dict[int, float]:
    """When each ended; a stopped one is killed as soon as all others have, and all are when the time is over."""
    ends: dict[int, float] = {}
    while len(ends) < len(processes) and time.monotonic() - began < seconds:
        for rank, process in processes.items():
            if rank not in ends and (not process.is_alive() or (len(ends) == len(processes) - 1 and _stopped(process))):
                ends[rank] = time.monotonic() - began
        time.sleep(0.02)
    for process in processes.values():
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
    return ends


def _stopped(process: Any) -> bool:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def _worker(words: Mapping[str, str], function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    os.environ.update(words)
    return function(*args)


def _outcome(result: Path, output: Path, seconds: float) -> Outcome:
    printed = output.read_text(errors="replace")[-6000:] if output.exists() else ""
    if not result.exists() or not result.stat().st_size:
        return Outcome(None, "", printed, seconds)
    worked, value = pickle.loads(result.read_bytes())
    return Outcome(value, "", printed, seconds) if worked else Outcome(None, value, printed, seconds)
