"""Detects waits without end: for a collective call that only some workers make, and of a device for a lost worker.

A warning, long before the timeout, while workers wait for each other in different calls:

    waits/<rank>   {"calls": collective calls that it has entered, "calling": whether it waits in one, "phase": where}
                   while its worker waits for long; else empty

Where all wait, and not all have entered the same number of calls, some wait in one that the others haven't come to;
they still may, behind a message that is slow. Where all are in a call of the same number, but some of them in a step
and some in a validation, it isn't the same. It's a warning, and ends nobody.

A rescue, since NCCL notifies nobody of a loss, and the host may stand anywhere:

    behind   the device hasn't come to where the host was so long ago (`Backlog`): it may wait for another worker
    lost     another worker wrote why it ends, has written no beat for LOST_SECONDS, or took the store with it;
             or the device has been behind for the timeout
    freed    all communicators are aborted, so that their kernels return; `check` raises PeerLost in the training's
             thread, which the host comes to at the end of its round

Until then the host stands in whatever needs the device next: a read, the user's `.item()`, a full queue of launches.
There no Python of its thread runs, hence the thread that reads the board. By gloo the host waits and is notified.
"""

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

LONG_SECONDS = 30.0  # a wait that is worth a warning


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
    mine: Callable[[], Wait | None]  # what this worker has waited in for `LONG_SECONDS`; None where it hasn't
    _reported: Wait | None = field(default=None, init=False)  # what stands on the board
    _warned: int = field(default=-1, init=False)  # calls at the last warning

    def look(self) -> bool:
        """Report and compare waits; a thread calls this periodically."""
        mine = self.mine()
        if mine != self._reported:
            self.board.write("waits", "null" if mine is None else json.dumps(asdict(mine)))
            self._reported = mine
        elif mine is not None and mine.calls > self._warned:  # not at once: a number that others wrote may be old
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
        # Some are in a call that others haven't entered, or in another of the same number.
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
"""Time after another's ending in which the host may come to an error of its own, or the device to its work's end."""
LOST_SECONDS = 15.0  # without a beat, while this device is behind: longer than a thread that beats is kept from running
END_SECONDS = 30.0  # time for the host to come back from the device; then the process ends where it stands


class Backlog:
    """Measures how far a device is behind the host, from any thread; a host is never behind."""

    def __init__(self, device: bool) -> None:
        self._device = device  # whether there is one, whose current stream is meant
        self._open: deque[tuple[cuda.Event, float]] = deque()  # marks that it hasn't reached, and when the host did
        self._lock = threading.Lock()

    def mark(self) -> None:
        """Record an event on the current stream: `since` looks after the work queued so far."""
        if self._device:
            self.since()  # nobody else may ever ask
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
    behind: Callable[[], float | None]  # since when the device has been, by the monotonic clock; None where it isn't
    abort: Callable[[], None]  # ends all that its kernels wait for
    timeout: float  # seconds that a worker waits for another, anywhere
    end: Callable[[int], object] = os._exit  # of a process whose host doesn't come back

    def __post_init__(self) -> None:
        self._beats: dict[int, tuple[int | None, float]] = {}  # of each worker: the last, and since when
        self._lost: str | None = None
        self._closed = threading.Event()
        self.heartbeat.listen(self._look)
        self.heartbeat.when_orphaned(self._look_on)

    def check(self) -> None:
        """Raises:
        PeerLost: the device was freed, so its results since then are invalid.
        """
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
        # Before the host can come back: its own error then may name whom a kernel left in the middle.
        print(self._lost, file=sys.stderr, flush=True)

        def end_if_it_stands() -> None:
            if not self._closed.wait(END_SECONDS):
                print("its device doesn't come back: this process ends", file=sys.stderr, flush=True)
                self.end(1)

        threading.Thread(target=end_if_it_stands, name="lightning_decentral-rescue", daemon=True).start()
        self.abort()
