"""A device that waits for a lost worker is freed: NCCL notifies nobody of a loss, and the host may stand anywhere.

    behind   the device hasn't come to where the host was so long ago (`Backlog`): it may wait for another worker
    lost     another worker wrote why it ends, has written no beat for LOST_SECONDS, or took the store with it;
             or the device has been behind for the timeout
    freed    all communicators are aborted, so that their kernels return; `check` raises PeerLost in the training's
             thread, which the host comes to at the end of its round

Until then the host stands in whatever needs the device next: a read, the user's `.item()`, a full queue of launches.
There no Python of its thread runs, hence the thread that reads the notices. By gloo the host waits and is notified.
"""

import os
import sys
import threading
import time
from collections.abc import Callable

from lightning_decentral.shared.wire.meeting.notices import ALL_LIVE, Presence
from lightning_decentral.shared.wire.pending import PeerLost

GRACE_SECONDS = 2.0
"""Time after another's ending in which the host may come to an error of its own, or the device to its work's end."""
LOST_SECONDS = 15.0
"""Without a beat, while this device is behind: longer than a thread that beats is kept from running."""
END_SECONDS = 30.0
"""Time for the host to come back from the device; then the process ends where it stands."""


class Rescue:
    """One worker's, of one fit, validation or test.

    Args:
        behind: since when the device has been behind, by the monotonic clock; None where it isn't.
        abort: ends all that its kernels wait for.
        timeout: seconds that a worker waits for another, anywhere.
        end: of a process whose host doesn't come back.
    """

    def __init__(
        self,
        presence: Presence,
        behind: Callable[[], float | None],
        abort: Callable[[], None],
        timeout: float,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._presence, self._behind, self._abort, self._timeout, self._end = presence, behind, abort, timeout, end
        self._beats: dict[int, tuple[int | None, float]] = {}
        self._lost: str | None = None
        self._closed = threading.Event()
        presence.listen(self._look)
        presence.when_orphaned(self._look_on)

    def check(self) -> None:
        """Raises:
        PeerLost: the device was freed; what it computed since is of no use.
        """
        if self._lost is not None:
            raise PeerLost(self._lost)

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            self._presence.forget(self._look)

    def _look(self) -> bool:
        behind = self._seconds()
        if behind < GRACE_SECONDS:
            self._beats = {}
        elif self._presence.notices.look() or self._silent() or behind > self._timeout:
            self._free()
        return False

    def _look_on(self) -> None:
        """The store is gone, and who had it."""
        while not self._closed.wait(GRACE_SECONDS / 10) and self._lost is None:
            if self._seconds() > GRACE_SECONDS:
                self._free()

    def _seconds(self) -> float:
        since = self._behind()
        return 0.0 if since is None or self._lost is not None else time.monotonic() - since

    def _silent(self) -> bool:
        """Return whether another has written no beat for long."""
        notices, now = self._presence.notices, time.monotonic()
        for rank in range(notices.size):
            beat = notices.read(f"beat/{rank}", int)
            if rank not in self._beats or self._beats[rank][0] != beat:
                self._beats[rank] = beat, now
        return any(now - since > LOST_SECONDS for rank, (_, since) in self._beats.items() if rank != notices.rank)

    def _free(self) -> None:
        notices = self._presence.notices
        self._presence.freed = True
        self._lost = f"worker {notices.rank} lost the others: {notices.blame() or ALL_LIVE}"
        # Before the host can come back: its own error then may name whom a kernel left in the middle.
        print(self._lost, file=sys.stderr, flush=True)
        threading.Thread(target=self._end_if_it_stands, name="lightning_decentral-rescue", daemon=True).start()
        self._abort()

    def _end_if_it_stands(self) -> None:
        if not self._closed.wait(END_SECONDS):
            print("its device doesn't come back: this process ends", file=sys.stderr, flush=True)
            self._end(1)
