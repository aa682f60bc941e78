"""Workers that are started by themselves, as by torchrun: each may be given something else."""

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import ports
from tests.tiny import in_processes


def started_apart(
    function: Callable[..., Any], size: int, folder: Path, *args: Any, seconds: float = 60.0
) -> list[str]:
    """What `function(rank, *args)` returned in a process of its own for each rank, or "Type: text" of what it raised;
    and behind it, after a line break, the seconds it took."""
    return list(in_processes(_start, function, size, folder, args, seconds=seconds))


def lines(found: list[str]) -> list[str]:
    return [text.rpartition("\n")[0] for text in found]


def _start(function: Callable[..., Any], size: int, folder: Path, args: tuple[Any, ...]) -> list[str]:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports.free()), WORLD_SIZE=str(size))
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_work, args=(function, rank, folder, args)) for rank in range(size)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    results = [folder / f"{rank}.result" for rank in range(size)]
    return [
        r.read_text() if r.exists() else f"ended with {w.exitcode}\n" for r, w in zip(results, workers, strict=True)
    ]


def _work(function: Callable[..., Any], rank: int, folder: Path, args: tuple[Any, ...]) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    begin = time.monotonic()
    try:
        said = str(function(rank, *args))
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    (folder / f"{rank}.result").write_text(f"{said}\n{time.monotonic() - begin:.1f}")
