"""Handles of messages in flight, the error that names a lost peer, and the transports that one worker has opened."""

import atexit
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

GRACE, PATIENCE = 1.0, 5.0
"""Seconds until abandoned groups are deleted; seconds that the program's end waits for a deletion that has begun."""


class PeerLost(ConnectionError):
    """A neighbour ended, or its connection broke, while a message to or from the neighbour was in flight."""


class Pending(Protocol):
    """Handle of a message in flight."""

    def wait(self) -> None:
        """Return when the tensor may be read (a receive) or overwritten (a send)."""

    def done(self) -> bool:
        """Return whether `wait` would return at once. Only collectives know on gloo."""


@dataclass
class StagedCopy:
    """Handle of a message through host memory: waits, then copies to the device; keeps the host tensor alive."""

    inner: Pending
    host: Tensor  # pinned, of the same shape
    device: Tensor | None  # None for a send

    def wait(self) -> None:
        self.inner.wait()
        if self.device is not None:
            self.device.copy_(self.host)

    def done(self) -> bool:
        return self.inner.done()


@dataclass
class Together:
    """Handle of several messages as one."""

    parts: Sequence[Pending]

    def wait(self) -> None:
        for part in self.parts:
            part.wait()

    def done(self) -> bool:
        return all(part.done() for part in self.parts)


def raise_lost(error: RuntimeError, peer: str, rank: int) -> None:
    """Raise PeerLost if the backend's error means that a peer is lost; do nothing for any other error."""
    # Backends raise RuntimeError for everything: only the text shows a lost peer.
    if re.search("closed|reset|refused|timed? ?out|gloo|NCCL|abort", str(error)):
        reason = re.sub(r"^\[[^]]*\] *", "", str(error)).split(". ")[0]
        raise PeerLost(
            f"worker {rank} lost {peer} ({reason}): it ended or its network is cut; see that worker's own output"
        ) from error


class Opened:
    """Transports that one worker has opened, to close together."""

    def __init__(self) -> None:
        self._transports: list[Any] = []

    def add(self, transport: Any) -> None:
        self._transports.append(transport)

    def close(self) -> None:
        """Close the transports, on every worker, with no message in flight."""
        while self._transports:
            self._transports.pop().close()

    def abandon(self) -> None:
        """Abandon the transports on this worker alone, also with messages in flight: a thread waits for their end."""
        left = [one for one in self._transports if not one.queued]  # NCCL groups stay: ending one waits for its kernels
        groups = [one.group for one in left]  # the last references: deleting a gloo group waits for its messages
        for one in left:
            one.close()
        self._transports = []
        lock = threading.Lock()

        def delete() -> None:
            # A program that ends sooner, as most do, leaves the groups to the system. In one that goes on, a peer that
            # waits for this worker only notices so much later.
            time.sleep(GRACE)
            with lock:
                groups.clear()
            atexit.unregister(end)

        def end() -> None:
            # A thread that came back from gloo's C++ to an interpreter that ends would abort the process. References
            # stay from then on: no further deletion begins, and the system closes the connections.
            lock.acquire(timeout=PATIENCE)

        atexit.register(end)
        threading.Thread(target=delete, name="lightning_decentral-abandoned", daemon=True).start()
