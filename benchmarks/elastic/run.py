"""The lobby and the workers of `elastic.py`, and where they run: on this machine, or on hosts whose links are cut."""

import ctypes
import json
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

from elastic.worker import Job, train
from lightning_decentral.elastic.plan.view import Bounds, Times
from lightning_decentral.elastic.wire.lobby_server import serve
from network.cluster import Cluster

FORK = multiprocessing.get_context("fork")
Row = dict[str, Any]
WARM = 20
"""First steps of a run, of which nothing is measured."""
WAIT_SECONDS = 120.0
NEW_NETWORK = 0x40000000
"""CLONE_NEWNET of `setns`, which Python has from 3.12 on."""


class Here:
    """One network for all."""

    faults: tuple[str, ...] = ("kill", "stall")

    def address(self, index: int) -> str:
        return "127.0.0.1"

    def enter(self, index: int) -> None:
        """Called in a process that is to be at this host."""

    def link(self, index: int, to: str) -> None:
        raise ValueError("one network has no links: give --rate")


class Hosts(Here):
    """A namespace for each process, the lobby's is the first; see `cluster.py`."""

    faults = ("kill", "stall", "cut")

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def address(self, index: int) -> str:
        return self._cluster.address(index)

    def enter(self, index: int) -> None:
        with Path("/var/run/netns", self._cluster.host(index)).open() as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), NEW_NETWORK):
                raise OSError(ctypes.get_errno(), "setns")

    def link(self, index: int, to: str) -> None:
        """`to`: up or down, at the switch: what the host sends is lost, and nothing there says so."""
        subprocess.run(["ip", "-n", self._cluster.switch, "link", "set", f"port{index}", to], check=True)


class Run:
    """A lobby and workers, in processes; all are killed in the end.

    Args:
        train: what a worker does.
    """

    def __init__(self, job: Job, place: Here, train: Callable[[int, Job, str], None] = train) -> None:
        self._lobby: Any = None
        self._train = train
        self.job, self.place = job, place
        self.alive: dict[str, Any] = {}
        self.hosts: dict[str, int] = {}
        self.names: list[str] = []

    def __enter__(self) -> "Run":
        ready, says = FORK.Pipe(duplex=False)
        bounds = Bounds(max(1, self.job.workers // 2), self.job.workers)
        host = self.place.address(0)
        args: tuple[Any, ...] = serve, bounds, Times(self.job.dead_after), host, 0, says.send
        if self.job.peer:
            from elastic import torchft_worker  # an extra, whose threads mustn't be forked

            args, self._train = (torchft_worker.lighthouse, self.job, host, says.send), torchft_worker.train
        self._lobby = FORK.Process(target=self._at, args=(0, *args), daemon=True)
        self._lobby.start()
        self.job = replace(self.job, lobby=f"{host}:{ready.recv()}")
        for _ in range(self.job.workers):
            self.start()
        return self

    @property
    def lobby_pid(self) -> int:
        return int(self._lobby.pid)

    def start(self) -> str:
        name = f"w{len(self.names)}"
        self.names.append(name)
        taken = {self.hosts[other] for other in self.alive}
        self.hosts[name] = host = min(set(range(1, len(taken) + 2)) - taken)
        self.alive[name] = self.begun(host, replace(self.job, host=self.place.address(host)), name)
        return name

    def begun(self, host: int, job: Job, name: str) -> Any:
        """Start the process of a worker at this host."""
        process = FORK.Process(target=self._at, args=(host, self._train, os.getpid(), job, name))
        process.start()
        return process

    def _at(self, host: int, call: Callable[..., None], *args: Any) -> None:
        self.place.enter(host)
        call(*args)

    def warm(self) -> bool:
        """Wait until all train, and return whether they do. A worker that came just while the run began has ended: it
        is started again."""
        for _ in self.fallen():
            self.start()
        return all(len(self.said(name, "step")) > WARM for name in self.alive)

    def kill(self, name: str) -> float:
        """Kill this worker; return the time."""
        process, at = self.alive.pop(name), time.monotonic()
        process.kill()
        process.join()
        return at

    def lose(self, name: str) -> float:
        """Kill what a fault takes of this worker; return the time."""
        return self.kill(name)

    def fallen(self) -> list[str]:
        """Return, and forget, the workers that ended before the run did, with an error in their logs: cut off, or
        asleep for too long."""
        gone = [name for name, process in self.alive.items() if not process.is_alive() and not self.has_ended(name)]
        for name in gone:
            self.alive.pop(name)
        return gone

    def begin(self, fault: str, name: str) -> Callable[[], None]:
        """A stall or a cut; what ends it."""
        process, host = self.alive[name], self.hosts[name]
        if fault == "cut":
            self.place.link(host, "down")
            return lambda: self.place.link(host, "up")
        os.kill(process.pid, signal.SIGSTOP)
        return lambda: os.kill(process.pid, signal.SIGCONT) if process.is_alive() else None

    def said(self, name: str, kind: str) -> list[Row]:
        return lines(self.job.folder / f"{name}.jsonl", kind)

    def has_ended(self, name: str) -> bool:
        """Return whether the log's last line says so: reading all of a long run's log again would take a core from its
        workers."""
        file = self.job.folder / f"{name}.jsonl"
        if not file.exists():
            return False
        with file.open("rb") as stream:
            stream.seek(max(0, file.stat().st_size - 200))
            return b'"kind": "end"' in stream.read()

    def is_over(self) -> bool:
        return any(self.has_ended(name) for name in self.alive)

    def until(self, holds: Callable[[], bool], seconds: float = WAIT_SECONDS) -> None:
        end = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > end:
                logs = [(self.job.folder / f"{name}.log").read_text()[-1500:] for name in self.names[-2:]]
                raise TimeoutError("\n".join(logs))
            time.sleep(0.02)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for name in list(self.alive):
            self.kill(name)
        self._lobby.kill()


def lines(file: Path, kind: str) -> list[Row]:
    text = file.read_text() if file.exists() else ""
    return [row for row in map(json.loads, text.split("\n")[:-1]) if row["kind"] == kind]


def took(steps: list[Row]) -> list[tuple[float, float]]:
    """(when it ended, seconds) of each step but the first."""
    return [(b["at"], b["at"] - a["at"]) for a, b in pairwise(steps)]
