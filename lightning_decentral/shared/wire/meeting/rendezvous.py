"""Rendezvous of all workers at worker 0's store: names missing workers, and workers that don't belong to the job.

    job            worker 0's state: "open <token>", or "closed <digest of the token>"
    layout         worker 0's number of nodes, and of devices on each
    differs        one line from the first worker that has another layout, and ends
    here/<rank>    the process that claims this rank
    verdict        "complete", or why all end: a worker with another layout came, and some worker was still missing soon
    after (if none is missing, that worker belonged to another job)

A job's keys begin with its token: one of the environment variable LIGHTNING_DECENTRAL_TOKEN, the same on all workers,
or a random one, which worker 0 writes down where every program that reaches the port can read it. A token keeps stray
programs and other jobs away; it isn't encryption: what is sent is readable on its way."""

import errno
import hashlib
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.torch_version import TorchVersion

from lightning_decentral.shared.wire.transport import STORES

LIBUV_LISTENS = TorchVersion(torch.__version__) >= "2.8"
"""Whether torch's libuv store server takes a listening socket (pytorch#150215); torch's older server does."""
TOKEN = "LIGHTNING_DECENTRAL_TOKEN"
LOOK_SECONDS = 0.05
DOUBT_SECONDS = 10.0  # seconds that the rest of the workers have to come once one with another layout has come
NAMED = 4  # number of missing workers that a message names
COMPLETE = "complete"
SLOW_SECONDS = 10.0  # seconds of a wait until a line names the missing workers; the next line after six times as long
LINGER_SECONDS = 2.0  # seconds that worker 0 keeps the store after a failed rendezvous, for the others to read why

_met: Counter[str] = Counter()
"""{address: number of rendezvous of this process there}: a second one at the same store has other keys. By address:
a process that runs one training after another (in a pool, an actor) may have met other processes before."""


class MeetingFailed(ConnectionError):
    """Error: not all workers reached the rendezvous."""


@dataclass(frozen=True)
class Meeting:
    """Rendezvous of `size` workers, and how long each waits for the others."""

    address: str
    port: int
    rank: int
    size: int
    timeout: timedelta
    hosted: bool  # another process (torchrun's agent) has the store
    layout: tuple[int, int]  # (nodes, devices on each node) as this worker was started

    def __post_init__(self) -> None:
        if not 0 < self.port < 1 << 16:
            raise ValueError(f"MASTER_PORT must be from 1 to 65535, got {self.port}: set a free one on all workers")
        if not 0 <= self.rank < self.size:
            raise ValueError(
                f"there is no worker {self.rank} among {self.size}: set NODE_RANK, LOCAL_RANK, num_nodes and devices "
                "to the processes that were started"
            )

    @property
    def place(self) -> str:
        return f"{self.address}:{self.port}"

    @property
    def _keeper(self) -> str:
        return "torchrun's agent at that address" if self.hosted else "worker 0"

    def store(self) -> Any:
        """Return the store that all workers have reached; its keys are the job's own. MeetingFailed: one line with the
        missing workers, or with the other program at this port. ValueError: a worker has another number of nodes or
        devices; the same line on all."""
        _met[self.place] += 1
        end = time.monotonic() + self.timeout.total_seconds()
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        try:
            reached = self._reach()
            met = STORES.PrefixStore(f"lightning_decentral/{attempt}/{_met[self.place]}", reached)
            return self._all_here(STORES.PrefixStore(self._token(met, end), reached), end)
        except (MeetingFailed, ValueError):
            time.sleep(LINGER_SECONDS if self.rank == 0 and not self.hosted else 0.0)
            raise
        except RuntimeError as error:
            raise MeetingFailed(
                f"worker {self.rank} lost the store at {self.place}: {self._keeper} ended; see its output"
            ) from error

    def _reach(self) -> Any:
        server, found = dict[str, Any](), list[Any]()
        if self.rank == 0 and not self.hosted:
            server = {"is_master": True, "master_listen_fd": self._listen(), "use_libuv": LIBUV_LISTENS}

        def reach() -> None:
            place: Any = self.address, self.port
            with suppress(RuntimeError):  # the error is raised below
                found.append(STORES.TCPStore(*place, timeout=self.timeout, wait_for_workers=False, **server))

        # A thread: a program that takes the connection and sends nothing would keep torch waiting for ever.
        thread = threading.Thread(target=reach, name="lightning_decentral-rendezvous", daemon=True)
        thread.start()
        end, slow = time.monotonic() + self.timeout.total_seconds(), SlowWait()
        while thread.is_alive() and time.monotonic() < end:
            thread.join(min(slow.seconds, end - time.monotonic()))
            if thread.is_alive() and self.rank % self.layout[1] == 0:
                slow.report(f"waiting for {self._keeper} at {self.place}")
        if not found:
            raise MeetingFailed(
                f"worker {self.rank} reached no store at {self.place}: {self._keeper} didn't start, "
                "ended or can't be reached, or another program has the port"
            )
        return found[0]

    def _listen(self) -> int:
        """Return the descriptor of a socket that listens on the given address alone."""
        try:
            family, _, _, _, address = socket.getaddrinfo(self.address, self.port, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            raise MeetingFailed(
                f"worker 0 knows no address {self.address} ({error.strerror}): set MASTER_ADDR to one of its own"
            ) from error
        # This host's name may mean loopback here and the network's address elsewhere.
        everywhere = self.layout[0] > 1 and str(address[0]).startswith(("127.", "::1"))
        for place in [] if everywhere else [address]:
            try:
                return socket.create_server(place[:2], family=family, backlog=2048).detach()
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise MeetingFailed(
                        f"worker 0 can't listen at {self.place}: another program or training has the port; "
                        "set MASTER_PORT to a free one"
                    ) from error
                # The address belongs to a machine that forwards to this one: listen on all addresses, as torch does.
        try:
            return socket.create_server(("", self.port), backlog=2048).detach()
        except OSError as error:
            raise MeetingFailed(f"worker 0 can't listen at port {self.port}: {error.strerror}") from error

    def _token(self, met: Any, end: float) -> str:
        own = os.environ.get(TOKEN, "")
        state = f"closed {_digest('job', own)}" if own else f"open {secrets.token_hex(16)}"
        if self.rank == 0:
            met.set("job", state)
        self._wait(lambda: bool(met.check(["job"])), end, lambda: "worker 0")
        found = met.get("job").decode(errors="replace")
        if (found != state) if own else not found.startswith("open "):
            raise MeetingFailed(
                f"worker {self.rank} found another job at {self.place}, or one with another {TOKEN}: "
                "set both MASTER_PORT and the token alike on all workers of a job"
            )
        return _digest("keys", own or found)

    def _compare_layouts(self, store: Any, end: float) -> None:
        """Compare layouts before ranks are claimed: workers that count the others differently would share ranks."""
        mine = "num_nodes={}, devices={}".format(*self.layout)
        if self.rank == 0:
            store.set("layout", mine)
        self._wait(lambda: bool(store.check(["layout"])), end, lambda: "worker 0")
        first = store.get("layout").decode(errors="replace")
        if first != mine:
            line = (
                f"worker {self.rank} has {mine}, worker 0 has {first}: give every worker the same, and every job a "
                "MASTER_PORT of its own"
            )
            raise ValueError(store.compare_set("differs", "", line).decode(errors="replace"))

    def _doubt(self, store: Any, since: list[float], end: float) -> str:
        """Return the reason why all end, once a worker with another layout has been there for long; "" until then.

        Not at once: a stray worker of another job must not end this one, and without a token only the arrival of this
        job's own workers shows that the other one is a stray."""
        if store.check(["differs"]):
            since.append(time.monotonic())
            patience = min(DOUBT_SECONDS, self.timeout.total_seconds() / 2)
            if since[-1] - since[0] >= patience or since[-1] >= end:
                return str(store.get("differs").decode(errors="replace"))
        return ""

    def _all_here(self, store: Any, end: float) -> Any:
        self._compare_layouts(store, end)
        mine = secrets.token_hex(8)
        if store.compare_set(f"here/{self.rank}", "", mine).decode() != mine:
            raise MeetingFailed(
                f"a worker {self.rank} is at {self.place} already: another job meets at this port; "
                "set MASTER_PORT to a free one"
            )
        missing, doubts = list(range(self.size)), list[float]()

        def names() -> str:
            return " and ".join(f"worker {rank}" for rank in missing)

        def come() -> bool:
            missing[:] = [rank for rank in missing if not store.check([f"here/{rank}"])]
            line = self._doubt(store, doubts, end) if missing else COMPLETE
            if line or store.check(["verdict"]):
                verdict = store.compare_set("verdict", "", line).decode(errors="replace")
                if verdict != COMPLETE:
                    raise ValueError(verdict)
            return not missing

        def line() -> str:
            who = f": {names()}" if len(missing) <= NAMED else ""
            return f"waiting for {len(missing)} of {self.size} workers at {self.place}{who}"

        try:
            self._wait(come, end, names, line if self.rank == 0 else None)
        except RuntimeError as error:
            raise MeetingFailed(
                f"worker {self.rank} waited at {self.place} for {names()}, and the store is gone: "
                f"{self._keeper} ended; see its output"
            ) from error
        return store

    def _wait(
        self, come: Callable[[], bool], end: float, missing: Callable[[], str], line: Callable[[], str] | None = None
    ) -> None:
        slow = SlowWait()
        while not come():
            if line is not None and slow.seconds <= 0:
                slow.report(line())
            if time.monotonic() > end:
                raise MeetingFailed(
                    f"worker {self.rank} waited {self.timeout.total_seconds():g} s at {self.place} for {missing()}: "
                    "not started, ended before it came, or can't reach this address; see its own output"
                )
            time.sleep(LOOK_SECONDS)


class SlowWait:
    """Prints a line when a wait takes long, and again after each six times as long."""

    def __init__(self) -> None:
        self._began, self._after = time.monotonic(), SLOW_SECONDS

    @property
    def seconds(self) -> float:
        """Seconds until the next line is due."""
        return max(0.0, self._began + self._after - time.monotonic())

    def report(self, line: str) -> None:
        if not self.seconds:
            self._after *= 6
            print(f"lightning_decentral: {line}", file=sys.stderr, flush=True)


def group_failed(store: Any, rank: int, error: RuntimeError) -> MeetingFailed:
    """Return the error to raise, instead of the raw text. All workers that still reach the store get a line
    of the first worker that couldn't make a group; the others only waited for that worker."""
    text = re.sub(r"^\[[^]]*\]", "", str(error).partition("\n")[0]).strip()  # without the place in gloo's sources
    text = text or type(error).__name__
    line = f"worker {rank} can't make a group ({text}): look at GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, at its "
    line += "network and at what the others say"
    with suppress(RuntimeError):  # the store is gone
        line = store.compare_set("failed", "", line).decode(errors="replace")
        time.sleep(LINGER_SECONDS if rank == 0 else 0.0)
    return MeetingFailed(line)


def _digest(what: str, token: str) -> str:
    return hashlib.sha256(f"lightning_decentral {what} {token}".encode()).hexdigest()[:32]
