"""Detects endless waits: for a collective call that only some workers make, or of a device for a lost worker.

A warning, long before the timeout, while workers wait for each other in different calls:

    waits/<rank>   {"calls": number of collective calls entered, "calling": whether it waits in one, "phase": text}
                   while its worker waits for long; else empty

Where all wait, and have entered different numbers of calls, some wait in a call that the others haven't reached; these
may still reach it, after a slow message. Where all are in a call of the same number, but some in a step and some in a
validation, the calls differ. This is a warning, and ends no worker.

A rescue, since NCCL doesn't report a lost worker, and the host may wait anywhere:

    behind   the device hasn't reached work that the host queued long ago (`Backlog`): it may wait for another worker
    lost     another worker wrote why it ends, has written no beat for LOST_SECONDS, or took the store with it;
             or the device has been behind for as long as the timeout
    freed    all communicators are aborted, so that their kernels return; `check` raises PeerLost in the training's
             thread, at the end of the host's round

Until then the host is blocked in a call that needs the device: a read, the user's `.item()`, a full launch queue. No
Python of its thread runs there, hence the thread that reads the board. With gloo the host waits and gets an error."""

import json
import os
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from lightning_decentral.shared.compute import cuda
from lightning_decentral.shared.wire.meeting.notices import ALL_LIVE, Heartbeat, StatusBoard, read_row
from lightning_decentral.shared.wire.pending import PeerLost

LONG_SECONDS = 30.0  # seconds after which a wait is reported


@dataclass(frozen=True)
class Wait:
    """Describes the call or round in which one worker waits right now."""

    calls: int
    calling: bool
    phase: str

    def __str__(self) -> str:
        return f"in {'a collective call' if self.calling else 'a round'} (in {self.phase})"


@dataclass(eq=False)
class Waits:
    """Reports one worker's long waits in a fit to the others, and warns where workers wait in different calls."""

    board: StatusBoard
    mine: Callable[[], Wait | None]  # returns this worker's wait if it has lasted for `LONG_SECONDS`, else None
    _reported: Wait | None = field(default=None, init=False)  # this worker's text on the board
    _warned: int = field(default=-1, init=False)  # numbers of calls at the last warning

    def look(self) -> bool:
        """Report and compare waits; a thread calls this periodically."""
        mine = self.mine()
        if mine != self._reported:
            self.board.write("waits", "null" if mine is None else json.dumps(asdict(mine)))
            self._reported = mine
        elif mine is not None and mine.calls > self._warned:  # checked twice: another worker's number may be old
            self._compare(mine)
        return False

    def _compare(self, mine: Wait) -> None:
        parse = lambda written: None if written == b"null" else read_row(Wait, written)  # noqa: E731
        found = [self.board.read(f"waits/{rank}", parse) for rank in range(self.board.size)]
        waiting = [wait for wait in found if wait is not None]
        if len(waiting) < len(found):
            return
        ahead = max(wait.calls for wait in waiting)
        last = [wait for wait in waiting if wait.calls == ahead]
        # Some workers are in a call that others haven't entered, or in a different call of the same number.
        differ = len(last) < len(waiting) or len({wait.phase.split()[0] for wait in last}) > 1
        if not differ or not all(wait.calling for wait in last):
            return
        self._warned = mine.calls
        places = [
            f"{' and '.join(f'worker {rank}' for rank, other in enumerate(waiting) if other == wait)} {wait}"
            for wait in dict.fromkeys(waiting)
        ]
        warnings.warn(
            f"all workers wait: {', '.join(places)}; if only some make this call (sync_dist=True, all_gather, "
            "barrier), it never ends",
            stacklevel=2,
        )


GRACE_SECONDS = 2.0
"""Seconds after another worker's end in which the host may meet its own error, or the device finish its work."""
LOST_SECONDS = 15.0  # without a heartbeat while this device is behind: longer than any delay of a live worker's thread
END_SECONDS = 30.0  # seconds for the host to return from the device; then the process is ended


class Backlog:
    """Measures how far a device is behind the host, from any thread; a host is never behind."""

    def __init__(self, device: bool) -> None:
        self._device = device  # whether there is a device, whose current stream is meant
        self._open: deque[tuple[cuda.Event, float]] = deque()  # (mark not reached, when the host set it)
        self._lock = threading.Lock()

    def mark(self) -> None:
        """Record an event on the current stream: `since` looks after the work queued so far."""
        if self._device:
            self.since()  # `since` may never be called
            event = cuda.Event()
            event.record()
            self._open.append((event, time.monotonic()))

    def since(self) -> float | None:
        """Return the time when the host set the oldest mark that the device hasn't reached; None without one."""
        with self._lock:
            while self._open and self._open[0][0].query():
                self._open.popleft()
            return self._open[0][1] if self._open else None


@dataclass(eq=False)
class Rescue:
    """Frees one worker's device when it waits for a lost worker, in one fit, validation or test."""

    heartbeat: Heartbeat
    behind: Callable[[], float | None]  # since when the device is behind, by the monotonic clock; None: it isn't
    abort: Callable[[], None]  # aborts the communicators that its kernels wait in
    timeout: float  # seconds that a worker waits for another, anywhere
    end: Callable[[int], object] = os._exit  # exit code of a process whose host doesn't return from the device

    def __post_init__(self) -> None:
        self._beats: dict[int, tuple[int | None, float]] = {}  # for each worker: (its last heartbeat, since when)
        self._lost: str | None = None
        self._closed = threading.Event()
        self.heartbeat.listen(self._look)
        self.heartbeat.when_orphaned(self._look_on)

    def check(self) -> None:
        """Raises:
        PeerLost: the device was freed, so its results since then are invalid."""
        if self._lost is not None:
            raise PeerLost(self._lost)

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            self.heartbeat.forget(self._look)

    def _look(self) -> bool:
        behind = self._seconds()
        if behind < GRACE_SECONDS:
            self._beats = {}
        elif self.heartbeat.board.look() or self._silent() or behind > self.timeout:
            self._free()
        return False

    def _look_on(self) -> None:
        """Keep watching the device after the store is lost, with the worker that kept it."""
        while not self._closed.wait(GRACE_SECONDS / 10) and self._lost is None:
            if self._seconds() > GRACE_SECONDS:
                self._free()

    def _seconds(self) -> float:
        since = self.behind()
        return 0.0 if since is None or self._lost is not None else time.monotonic() - since

    def _silent(self) -> bool:
        """Return whether another worker has written no heartbeat for `LOST_SECONDS`."""
        board, now = self.heartbeat.board, time.monotonic()
        for rank in range(board.size):
            beat = board.read(f"beat/{rank}", int)
            if rank not in self._beats or self._beats[rank][0] != beat:
                self._beats[rank] = beat, now
        return any(now - since > LOST_SECONDS for rank, (_, since) in self._beats.items() if rank != board.rank)

    def _free(self) -> None:
        board = self.heartbeat.board
        self.heartbeat.freed = True
        self._lost = f"worker {board.rank} lost the others: {board.blame() or ALL_LIVE}"
        # Set before the host can return: its own error might name another worker, in whose message a kernel stopped.
        print(self._lost, file=sys.stderr, flush=True)

        def end_if_it_stands() -> None:
            if not self._closed.wait(END_SECONDS):
                print("its device doesn't come back: this process ends", file=sys.stderr, flush=True)
                self.end(1)

        threading.Thread(target=end_if_it_stands, name="lightning_decentral-rescue", daemon=True).start()
        self.abort()
