"""Starts the elastic workers of one machine and a lobby for them, and restarts lost workers.

    lost before training begins   by an error: all workers are ended; by a signal: started again
    lost while members train      started again; a worker that was lost early only after a pause
    ended by SIGTERM              counts as left: it isn't replaced
    no member is left             no worker is started again, and waiting ones are ended

A worker's environment has the lobby's address, the number of its start, its seat among the workers of this machine, and
the process id of the starter, with which the worker ends."""

import asyncio
import os
import platform
import queue
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from lightning_decentral.elastic.plan.view import Bounds, Times
from lightning_decentral.elastic.wire.lobby_server import LobbyServer
from lightning_decentral.elastic.wire.sockets.keys import Key
from lightning_decentral.shared.wire.meeting.interrupts import terminated_as_interrupted

LOBBY, WORKER, SEAT, STARTER = (f"LIGHTNING_DECENTRAL_{name}" for name in ("LOBBY", "WORKER", "SEAT", "STARTER"))
LOOK_SECONDS, FOLLOW_SECONDS = 0.1, 1.0
HASTY_SECONDS, LONGEST_PAUSE = 30.0, 60.0
TERMINATED = -signal.SIGTERM, 128 + signal.SIGTERM
"""Exit codes of a worker that SIGTERM ended: directly, or through Lightning's handler."""
LEAVE_SECONDS = 20.0  # seconds after which a worker that was asked to end is killed


Members = Callable[[], tuple[tuple[str, ...], tuple[str, ...]]]
"""Returns the members of all views so far, and those of the present view that haven't left."""


def own_lobby(bounds: Bounds, times: Times, say: Callable[[str], None], key: Key | None = None) -> tuple[str, Members]:
    """Start a lobby on a thread of this process, reachable from this machine only; return its address and members."""
    server, ports = LobbyServer(bounds, times, say, settled=True, key=key), queue.SimpleQueue[int]()
    serve = partial(asyncio.run, server.serve("127.0.0.1", 0, ports.put))
    threading.Thread(target=serve, name="lightning_decentral-lobby", daemon=True).start()
    return f"127.0.0.1:{ports.get()}", server.members  # returns once the lobby listens


@dataclass
class WorkerProcess:
    """Process of a worker that this starter has started."""

    process: "subprocess.Popen[bytes]"
    at: float
    seat: int
    told_to_end: float = float("inf")


def started_again(code: int, members: Collection[int] | None) -> bool:
    """Return whether a worker whose process ended with this code (negative: a signal) is started again. `members` are
    the remaining ones of the present view; None: there was no view yet."""
    if members is None:
        return code < 0 and code not in TERMINATED
    return code not in (0, *TERMINATED) and bool(members)


class Starter:
    """Starts and watches the workers of one run on this machine."""

    def __init__(
        self,
        workers: int,  # number of workers that train at a time
        command: Callable[[int], tuple[Sequence[str], str | None]],  # (command line, folder) of the n-th start
        members: Members,  # returns the lobby's members
        environment: Mapping[str, str],  # of all workers, in addition to this process's own
        say: Callable[[str], None],  # called with a line for each lost worker
    ) -> None:
        self._command, self._members_of, self._environment, self._say = command, members, environment, say
        self._running: dict[int, WorkerProcess] = {}
        self._due = [0.0] * workers  # by seat: when a seat without a worker gets a new one
        self._count = self._hasty = 0
        self._well, self._code = False, 1

    def run(self) -> int:
        """Run until all workers have ended; return 0 if at least one finished, else the last exit code. Ctrl-C or
        SIGTERM stops the workers, then raises KeyboardInterrupt."""
        try:
            with terminated_as_interrupted():
                self._watch()
        finally:
            self._due = []  # no worker is started any more
            self._end(self._running)
            self._watch()
        return 0 if self._well else self._code

    def _watch(self) -> None:
        while self._running or self._due:
            self._look(time.monotonic())
            time.sleep(LOOK_SECONDS)

    def _look(self, now: float) -> None:
        trained, there = (set(map(number_of, names)) for names in self._members_of())
        for number, worker in list(self._running.items()):
            code = worker.process.poll()
            if code is not None:
                del self._running[number]
                self._ended(number, worker, code, there & self._running.keys() if trained else None)
            elif now - worker.told_to_end > LEAVE_SECONDS:
                worker.process.kill()
        if trained and not there & self._running.keys():  # no member is left to send them its state
            self._due = []
            self._end(self._running.keys() - trained)
        for _ in [at for at in self._due if at <= now]:
            self._start(now)
        self._due = [at for at in self._due if at > now]

    def _start(self, now: float) -> None:
        number, self._count = self._count, self._count + 1
        command, folder = self._command(number)
        taken = {worker.seat for worker in self._running.values()}
        seat = min(set(range(len(taken) + 1)) - taken)  # a new worker gets the lost one's seat
        own = {WORKER: number, SEAT: seat, STARTER: os.getpid(), "LOCAL_RANK": number}  # Lightning reads the last
        names = {name: str(value) for name, value in own.items()}
        process = subprocess.Popen(command, env={**os.environ, **self._environment, **names}, cwd=folder)
        self._running[number] = WorkerProcess(process, now, seat)

    def _ended(self, number: int, worker: WorkerProcess, code: int, members: Collection[int] | None) -> None:
        now, self._well = time.monotonic(), self._well or code == 0
        if worker.told_to_end <= now:
            return
        self._code = code if code > 0 else 1
        how = f"code {code}" if code >= 0 else signal.Signals(-code).name
        if started_again(code, members):
            self._hasty = self._hasty + 1 if now - worker.at < HASTY_SECONDS else 0
            pause = min(2.0**self._hasty - 1, LONGEST_PAUSE)
            self._due.append(now + pause)
            self._say(f"worker {number} ended by {how}: another one is started" + (f" in {pause:g} s" if pause else ""))
        elif code:
            self._say(f"worker {number} ended by {how}")
            if members is None and code not in TERMINATED:
                self._due = []
                self._end(self._running)

    def _end(self, numbers: Collection[int]) -> None:
        for number in list(numbers):
            worker = self._running[number]
            if worker.told_to_end == float("inf"):
                worker.told_to_end = time.monotonic()
                worker.process.terminate()


def number_of(name: str) -> int:
    """Return the number of a member's start, by its name; -1 if this starter didn't start it."""
    found = re.match(r"w(\d+)-", name)
    return int(found[1]) if found else -1


def title(environment: Mapping[str, str]) -> str:
    """Return the prefix of a worker's name: the number of its start, or its host and process id."""
    if WORKER in environment:
        return f"w{environment[WORKER]}-"
    host = re.sub(r"[^\w-]", "", platform.node().partition(".")[0]) or "host"
    found = f"{host}-{os.getpid()}-"
    return found if number_of(found) < 0 else f"host-{found}"


def follow(environment: Mapping[str, str]) -> None:
    """Start a thread that ends this process when its starter has ended."""

    def watch(starter: int) -> None:
        with suppress(ProcessLookupError):
            while True:
                os.kill(starter, 0)
                time.sleep(FOLLOW_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(LEAVE_SECONDS)
        os._exit(1)  # in case SIGTERM doesn't end it

    threading.Thread(target=watch, args=(int(environment[STARTER]),), daemon=True).start()
