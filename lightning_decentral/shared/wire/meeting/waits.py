"""A collective call that only some workers make: a warning while they wait for each other, long before the timeout.

    waits/<rank>   {"calls": collective calls that it has entered, "calling": whether it waits in one, "phase": where}
                   while its worker waits for long; else empty

Where all wait, and not all have entered the same number of calls, some wait in one that the others haven't come to;
they still may, behind a message that is slow. Where all are in a call of the same number, but some of them in a step
and some in a validation, it isn't the same. It's a warning, and ends nobody.
"""

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from lightning_decentral.shared.wire.meeting.notices import Notices

LONG_SECONDS = 30.0
"""A wait that is worth a warning."""


@dataclass(frozen=True)
class Wait:
    """Wait of one worker, right now."""

    calls: int
    calling: bool
    phase: str

    @classmethod
    def read(cls, written: bytes) -> "Wait":
        """ValueError where it doesn't wait, and for what no worker wrote."""
        row = json.loads(written.decode())
        if not isinstance(row, dict) or {key: type(value) for key, value in row.items()} != cls.__annotations__:
            raise ValueError(f"not a wait: {row!r}")
        return cls(**row)

    def __str__(self) -> str:
        return f"in {'a collective call' if self.calling else 'a round'} (in {self.phase})"


class Waits:
    """One worker's, in one fit.

    Args:
        mine: what this worker has waited in for `LONG_SECONDS`; None where it hasn't.
    """

    def __init__(self, notices: Notices, mine: Callable[[], Wait | None]) -> None:
        self._notices, self._mine = notices, mine
        self._told: Wait | None = None
        self._warned = -1

    def look(self) -> bool:
        """Called again and again by a thread; never in a hurry."""
        mine = self._mine()
        if mine != self._told:
            self._notices.tell("waits", "null" if mine is None else json.dumps(asdict(mine)))
            self._told = mine
        elif mine is not None and mine.calls > self._warned:  # not at once: a number that others wrote may be old
            self._compare(mine)
        return False

    def _compare(self, mine: Wait) -> None:
        found = [self._notices.read(f"waits/{rank}", _maybe) for rank in range(self._notices.size)]
        waiting = [wait for wait in found if wait is not None]
        if len(waiting) < len(found) or not _apart(waiting):
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


def _apart(waiting: Sequence[Wait]) -> bool:
    """Return whether some are in a call that others haven't entered, or in another of the same number."""
    ahead = max(wait.calls for wait in waiting)
    last = [wait for wait in waiting if wait.calls == ahead]
    if not all(wait.calling for wait in last):
        return False
    return len(last) < len(waiting) or len({wait.phase.split()[0] for wait in last}) > 1


def _maybe(written: bytes) -> Wait | None:
    return None if written == b"null" else Wait.read(written)
