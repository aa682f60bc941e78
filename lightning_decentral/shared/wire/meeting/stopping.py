"""Stops all workers after the same round when a signal reaches one worker, without a step that waits for it.

    promise_i = rounds_i + 1;    stop = max_i promise_i      rounds_i: worker i's rounds so far, over all optimizers

Each worker's watching thread writes a promise to the store: its worker won't go on past that round before all have
promised. Then every worker knows after which round all stop. A worker only waits if it reaches its promised round
before the others have promised: a few reads of the store."""

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from lightning_decentral.shared.wire.meeting.notices import StatusBoard
from lightning_decentral.shared.wire.pending import PeerLost

SIGNALS, ROUNDS = range(1, 65), range(1, sys.maxsize)


@dataclass(eq=False)
class StopAgreement:
    """Agreement of one fit's workers on the step after which all stop."""

    board: StatusBoard  # a board whose keys are of this fit alone
    patience_seconds: float  # how long to wait for the others' promises
    wake: Callable[[], None] = lambda: None  # makes the watching thread read the board at once

    def __post_init__(self) -> None:
        self.raised = self.signum = 0  # the signal that this worker got; the one for which all stop; 0: none
        self._rounds = 0
        self._promise: int | None = None
        self._stop: int | None = None
        self._lock, self._known = threading.Lock(), threading.Event()

    def ask(self, signum: int) -> None:
        """Ask all workers to stop: this worker got a signal."""
        self.raised = signum
        self.wake()

    @property
    def agreed(self) -> bool:
        """Return whether this worker has reached the round after which all stop."""
        return self._stop is not None and self._rounds >= self._stop

    def tick(self) -> None:
        """Count a round: once per round of any optimizer, on every worker. PeerLost: another has made no promise."""
        with self._lock:
            self._rounds += 1
            due = self._promise is not None and self._rounds >= self._promise
        if due and not self._known.wait(self.patience_seconds):
            raise PeerLost(f"worker {self.board.rank} lost the others: they don't report after which step to stop")

    def look(self) -> bool:
        """Request a stop, promise, read others' promises; return whether one is missing. For the watching thread."""
        if self._known.is_set():
            return False
        if self.raised:
            self.board.put_first("stop", str(self.raised))
        signum = self.board.read("stop", partial(_number, SIGNALS))
        if signum is None:
            return False
        with self._lock:
            self._promise = self._promise or self._rounds + 1
        self.board.write("promise", str(self._promise))  # written again: another worker may have overwritten it
        promises = [self.board.read(f"promise/{rank}", partial(_number, ROUNDS)) for rank in range(self.board.size)]
        if None in promises:
            return True
        self.signum, self._stop = signum, max(promises)
        self._known.set()
        return False

    def left(self, rounds: Sequence[int]) -> None:
        """Report that this worker stops after these rounds of each optimizer, before the end of its epoch."""
        self.board.put("left", ",".join(map(str, rounds)))

    def left_after(self) -> list[int] | None:
        """Return each optimizer's round after which others have stopped, while this worker waits at its epoch's end;
        None: they haven't stopped."""
        rounds = lambda written: [_number(range(sys.maxsize), part) for part in written.split(b",")]  # noqa: E731
        known: list[int] | None = self.board.read("left", rounds) if self._known.is_set() else None
        return known


def _number(allowed: range, written: bytes) -> int:
    if (number := int(written)) not in allowed:
        raise ValueError(f"not one of {allowed}: {number}")
    return number
