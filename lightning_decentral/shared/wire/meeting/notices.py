"""Status board of workers in the key-value store, outside of all process groups: heartbeats, and why workers end.

    beat/<rank>    a number that grows while the process runs, every BEAT_SECONDS
    ended/<rank>   {"reason": one line, "phase": what it was doing, "lost": true if it ended because it lost another}

A worker that loses a peer in a message or a collective call reads here which peer, and why."""

import json
import re
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from lightning_decentral.shared.wire.pending import PeerLost

BEAT_SECONDS = 0.5
LOOK_SECONDS = 0.005
SILENT_SECONDS = 2.5  # when a worker reports a lost peer: seconds without a heartbeat after which that peer is blamed
LINGER_SECONDS = 1.5  # seconds that worker 0 keeps the store for the others to read why it ends
STORE_SECONDS = 10.0
"""Time for the store to answer a worker that ends: milliseconds, and `SILENT_SECONDS` to find silent workers."""
LONGEST_REASON = 500  # longest reason, in characters
Row = TypeVar("Row")


class Gone:
    """Stands in for a closed connection to the store; raises RuntimeError as a lost store does."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"this fit is over: its store can't be asked for {name} any more")


@dataclass(frozen=True)
class Ending:
    """Reason why a worker ended."""

    reason: str
    phase: str
    lost: bool  # it ended because it lost another worker, which `reason` names


def read_row(kind: type[Row], written: bytes) -> Row:
    """Read a dataclass that `json.dumps(asdict(value))` wrote. ValueError for a text that no worker wrote."""
    row = json.loads(written.decode())
    if not isinstance(row, dict) or {key: type(value) for key, value in row.items()} != kind.__annotations__:
        raise ValueError(f"no {kind.__name__}: {row!r}")
    return kind(**row)


class StatusBoard:
    """Status board of the workers of one fit, validation or test, in a store with keys of its own."""

    def __init__(self, store: Any, rank: int, size: int, hosted: bool = False) -> None:
        self._store, self.rank, self.size = store, rank, size
        self._hosted = hosted  # another process (torchrun's agent) has the store, not worker 0
        self.ignored = 0  # keys with values that no worker can have written: ignored, warned of once
        self._beats = self._agreed = 0
        self._endings: dict[int, Ending] = {}

    def close(self) -> None:
        """Close the connection, although other objects may refer to this board."""
        self._store = Gone()

    def beat(self) -> None:
        """Write a heartbeat: this worker is alive."""
        self._beats += 1
        self._store.set(f"beat/{self.rank}", str(self._beats))

    def write(self, what: str, text: str) -> None:
        """Write this worker's text under a key, for `read`."""
        self._store.set(f"{what}/{self.rank}", text)

    def put(self, key: str, text: str) -> None:
        """Write a text that any worker may overwrite, for `read`."""
        self._store.set(key, text)

    def put_first(self, key: str, text: str) -> None:
        """Write a text unless another worker has written one, for `read`."""
        self._store.compare_set(key, "", text)

    def end(self, ending: Ending) -> None:
        """Write why this worker ends; do nothing where the store is gone, as no worker could read it."""
        with suppress(RuntimeError):
            self._store.set(f"ended/{self.rank}", json.dumps(asdict(ending)))
            self._store.set("ended", "somebody")

    def look(self) -> Mapping[int, Ending]:
        """Return {rank: why it ended} of other workers; results are kept, since the store ends with worker 0."""
        if self._store.check(["ended"]):
            for rank in range(self.size):
                if rank != self.rank and rank not in self._endings:
                    ending = self.read(f"ended/{rank}", partial(read_row, Ending))
                    self._endings.update({} if ending is None else {rank: ending})
        return self._endings

    def agree(self, fine: bool, timeout: timedelta) -> bool:
        """Wait until all workers have called this as often; return whether all passed `fine`. Groups are made only
        together, in calls that nothing ends early. PeerLost: another worker has ended, or didn't come in time."""
        self._agreed += 1
        what, end = f"agreed/{self._agreed}", time.monotonic() + timeout.total_seconds()
        if not fine:
            self._store.set(f"{what}/not", "somebody")
        self._store.set(f"{what}/{self.rank}", "here")
        keys = [f"{what}/{rank}" for rank in range(self.size)]
        while not self._store.check(keys):
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            ended = [rank for rank in missing if rank in self.look()]
            if ended or (missing and time.monotonic() > end):
                names = " and ".join(f"worker {rank}" for rank in ended or missing)
                raise PeerLost(f"worker {self.rank} lost {names}")
            time.sleep(LOOK_SECONDS)
        return not self._store.check([f"{what}/not"])

    def read(self, key: str, parse: Callable[[bytes], Any]) -> Any:
        """Return the parsed value of a key; None if it has no value, or a value that no worker can have written."""
        if not self._store.check([key]):  # `get` waits for a key that isn't there
            return None
        try:
            return parse(self._store.get(key))
        except (ValueError, TypeError, RecursionError):
            self.ignored += 1
            if self.ignored == 1:
                warnings.warn(f"ignored a value at {key} in the store that no worker wrote", stacklevel=2)
            return None

    def blame(self) -> str | None:
        """Return one line on which worker caused a loss; None where unknown. Takes up to SILENT_SECONDS."""
        with suppress(RuntimeError):  # the store is gone, and the process that had it
            before, end = self._read_beats(), time.monotonic() + SILENT_SECONDS
            while time.monotonic() < end and all(ending.lost for ending in self.look().values()):
                time.sleep(0.1)
            if any(not ending.lost for ending in self._endings.values()):
                return _sentence(self._endings)
            after = self._read_beats()
            silent = [r for r, n in before.items() if n == after[r] and r not in self._endings and r != self.rank]
            if silent:
                names = " and ".join(f"worker {rank}" for rank in silent)
                return f"{names} left no word: killed, stopped, or cut off from the network; see its own output"
            return _sentence(self._endings)
        keeper = "torchrun's agent on the first node" if self._hosted else "worker 0"
        return _sentence(self._endings) or (
            f"{keeper}, which has the store, left no word: killed, stopped, or cut off from the network; see its own "
            "output, then start all workers again from the last checkpoint"
        )

    def _read_beats(self) -> dict[int, int | None]:
        return {rank: self.read(f"beat/{rank}", int) for rank in range(self.size)}


def _sentence(endings: Mapping[int, Ending]) -> str | None:
    first = sorted(endings.items(), key=lambda item: (item[1].lost, item[0]))[:1]
    return "".join(f"worker {rank} ended: {e.reason} (in {e.phase})" for rank, e in first) or None


ALL_LIVE = (
    "all live, so its network is cut, or workers wait for different things (a collective call, as sync_dist=True or "
    "all_gather, on some of them only); see the output of the others"
)
CUT_OFF = (
    "the store doesn't answer, so this worker is cut off from the network, or worker 0 is stopped; see its own output, "
    "then start all workers again from the last checkpoint"
)


class Heartbeat:
    """Thread that writes one worker's heartbeat and reads the board, since a waiting worker is blocked in a message."""

    def __init__(self, board: StatusBoard, phase: Callable[[], str]) -> None:
        self.board, self.phase = board, phase  # text on what this worker does right now
        # set where this device waited for a lost worker and was freed: the cause of any error that follows
        self.freed = False
        self._listeners: list[Callable[[], bool]] = []
        self._orphaned: list[Callable[[], None]] = []  # called where the store is gone
        self._woken, self._closed = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="lightning_decentral-heartbeat", daemon=True)
        self._thread.start()

    def listen(self, listener: Callable[[], bool]) -> None:
        """Call the listener at each look at the board; while it returns True, looks follow each other closely."""
        self._listeners.append(listener)

    def forget(self, listener: Callable[[], bool]) -> None:
        self._listeners.remove(listener)

    def when_orphaned(self, call: Callable[[], None]) -> None:
        """Run the call if the store is gone, after which no listener is called."""
        self._orphaned.append(call)

    def close(self) -> None:
        self._closed = True
        self.wake()
        self._thread.join(BEAT_SECONDS)

    def wake(self) -> None:
        """Make the thread look at the board at once."""
        self._woken.set()

    def _run(self) -> None:
        with suppress(RuntimeError):  # the store is gone: a worker that waits for worker 0 will report it
            beaten = float("-inf")
            while not self._closed:
                if time.monotonic() - beaten >= BEAT_SECONDS:
                    self.board.beat()
                    self.board.look()
                    beaten = time.monotonic()
                busy = sum(listener() for listener in [*self._listeners])  # all are called, also after a busy one
                self._woken.wait(BEAT_SECONDS / 20 if busy else BEAT_SECONDS)
                self._woken.clear()
        for call in [] if self._closed else [*self._orphaned]:
            call()

    def leave(self, error: BaseException) -> None:
        """Report to the others why this worker ends; an error that only reports a lost peer gets a one-line reason."""
        lost, phase = self.freed or is_loss(error), self.phase()
        answers = True
        if lost:
            head = one_line(error).split(" (")[0].split(":")[0] if isinstance(error, PeerLost) else None
            answers, blamed = within(STORE_SECONDS, self.board.blame)
            cause = (blamed or ALL_LIVE) if answers else CUT_OFF
            error.args = (f"{head or f'worker {self.board.rank} lost the others'} in {phase}: {cause}",)
        reason = one_line(error) if lost else f"{type(error).__name__}: {one_line(error)}"
        if answers and within(STORE_SECONDS, lambda: self.board.end(Ending(reason[:LONGEST_REASON], phase, lost)))[0]:
            time.sleep(LINGER_SECONDS if self.board.rank == 0 else 0)


def within(seconds: float, call: Callable[[], Any]) -> tuple[bool, Any]:
    """Run a call in a thread; return (True, its result), or (False, None) if it takes longer than `seconds`.

    A request over a connection that was cut waits for as long as the system keeps sending, a quarter of an hour."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()), name="lightning_decentral-asks", daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(found), found[0] if found else None


def is_loss(error: BaseException) -> bool:
    """Return whether the error reports a lost peer, in this package's text or in the transport's raw one."""
    if isinstance(error, PeerLost) or (isinstance(error, TimeoutError) and "didn't come to" in _text(error)):
        return True
    raw = type(error).__name__.startswith("Dist") or re.search(r"gloo/|Connection closed by peer|NCCL", _text(error))
    return isinstance(error, RuntimeError) and bool(raw)


def one_line(error: BaseException) -> str:
    return next((line.strip() for line in _text(error).splitlines() if line.strip()), type(error).__name__)


def _text(error: BaseException) -> str:
    """Return the error's text; empty where a user's exception can't make one, as the others must be notified anyway."""
    try:
        return str(error)
    except Exception:
        return ""
