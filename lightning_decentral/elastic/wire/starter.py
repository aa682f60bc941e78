"""Starts the elastic workers of one machine, and the lobby where they meet; starts a lost one again.

    lost before a view was made   by an error of its own: all are ended; by a signal: started again
    lost while members train      started again, they heal it; who hardly lived, after a pause
    ended by SIGTERM              left: somebody took it away, and nobody takes its place
    no member is left             nobody is started again, and who waits to become one is ended

A worker's environment holds where it meets the others, the number of its start, whose place it has among those
of this machine, and by which process: its workers end with that.
"""

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
from lightning_decentral.shared.wire.meeting.interrupts import terminated_as_interrupted

LOBBY, WORKER, SEAT, STARTER = (f"LIGHTNING_DECENTRAL_{name}" for name in ("LOBBY", "WORKER", "SEAT", "STARTER"))
LOOK_SECONDS, FOLLOW_SECONDS = 0.1, 1.0
HASTY_SECONDS, LONGEST_PAUSE = 30.0, 60.0
TERMINATED = -signal.SIGTERM, 128 + signal.SIGTERM
"""Codes of a worker that SIGTERM ended: by itself, or as Lightning ends then."""
LEAVE_SECONDS = 20.0  # seconds after which a worker that was asked to end is killed


Members = Callable[[], tuple[tuple[str, ...], tuple[str, ...]]]
"""Returns the members of all views so far, and those of the present one without who left."""


def own_lobby(bounds: Bounds, times: Times, say: Callable[[str], None]) -> tuple[str, Members]:
    """Start a lobby on a thread of this process, which only this machine reaches; return its place and members."""
    server, ports = LobbyServer(bounds, times, say, settled=True), queue.SimpleQueue[int]()
    serve = partial(asyncio.run, server.serve("127.0.0.1", 0, ports.put))
    threading.Thread(target=serve, name="lightning_decentral-lobby", daemon=True).start()
    return f"127.0.0.1:{ports.get()}", server.members  # there is a port when it listens


@dataclass
class WorkerProcess:
    """Process of a worker."""

    process: "subprocess.Popen[bytes]"
    at: float
    seat: int
    told_to_end: float = float("inf")


def started_again(code: int, members: Collection[int] | None) -> bool:
    """Return whether somebody takes the place of a worker whose process ended with this code, below 0 a signal's.
    `members` of the present view are left; None: there was no view yet."""
    if members is None:
        return code < 0 and code not in TERMINATED
    return code not in (0, *TERMINATED) and bool(members)


class Starter:
    """The workers of one run on this machine."""

    def __init__(
        self,
        workers: int,  # how many train
        command: Callable[[int], tuple[Sequence[str], str | None]],  # (line, folder) of the n-th that is started
        members: Members,  # of its lobby
        environment: Mapping[str, str],  # of all of them, in addition to this process's own
        say: Callable[[str], None],  # called with a line for each worker that is lost
    ) -> None:
        self._command, self._members_of, self._environment, self._say = command, members, environment, say
        self._running: dict[int, WorkerProcess] = {}
        self._due = [0.0] * workers  # when each seat without a worker gets one
        self._count = self._hasty = 0
        self._well, self._code = False, 1

    def run(self) -> int:
        """Run until all have ended; return 0 where one of them has ended as it should, else the code of the last one.
        KeyboardInterrupt by Ctrl-C, or SIGTERM, after all have ended."""
        try:
            with terminated_as_interrupted():
                self._watch()
        finally:
            self._due = []  # nobody takes a place any more
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
        if trained and not there & self._running.keys():  # nobody is left to heal them
            self._due = []
            self._end(self._running.keys() - trained)
        for _ in [at for at in self._due if at <= now]:
            self._start(now)
        self._due = [at for at in self._due if at > now]

    def _start(self, now: float) -> None:
        number, self._count = self._count, self._count + 1
        command, folder = self._command(number)
        taken = {worker.seat for worker in self._running.values()}
        seat = min(set(range(len(taken) + 1)) - taken)  # a lost worker's place is the next one's
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
    """Number in the order of starts, by a member's name; -1: another starter's, or nobody's."""
    found = re.match(r"w(\d+)-", name)
    return int(found[1]) if found else -1


def title(environment: Mapping[str, str]) -> str:
    """Beginning of the name of a worker with this environment: its number, or the host and process."""
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
        os._exit(1)  # it hangs in something that SIGTERM doesn't end

    threading.Thread(target=watch, args=(int(environment[STARTER]),), daemon=True).start()
