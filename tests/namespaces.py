"""Scripts on the hosts of a cluster of namespaces, and torchrun whose workers import nothing again."""

import ctypes
import time
from pathlib import Path

CLONE_NEWNET = 0x40000000
WORKER = """#!/bin/sh
env -0 > {folder}/$RANK.partial && mv {folder}/$RANK.partial {folder}/$RANK.environment
while ! test -e {folder}/$RANK.code; do sleep 0.05; done
exit $(cat {folder}/$RANK.code)
"""


def enter(namespace: str) -> None:
    """This thread, and every process that it starts, is on that host from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns({namespace})")


def stand_in(folder: Path) -> Path:
    """What torchrun starts as a worker: a shell that says what environment it was given, and ends as it is told.

    The worker itself is another process, one that has the package imported already.
    """
    file = folder / "worker.sh"
    file.write_text(WORKER.format(folder=folder))
    file.chmod(0o755)
    return file


def given(folder: Path, size: int, seconds: float = 30.0) -> list[dict[str, str]]:
    """The environment that torchrun gave to each rank."""
    files = [folder / f"{rank}.environment" for rank in range(size)]
    end = time.monotonic() + seconds
    while not all(file.exists() for file in files):
        assert time.monotonic() < end, f"torchrun started {sum(file.exists() for file in files)} of {size} workers"
        time.sleep(0.05)
    return [dict(entry.split("=", 1) for entry in file.read_text().split("\0") if entry) for file in files]
