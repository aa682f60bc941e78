"""Streams of the simulated device: what is queued, which of it runs next, what made the host wait."""

import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

import lightning_decentral

PACKAGE = str(Path(lightning_decentral.__file__).parent) + "/"
CUDA = torch.device("cuda", 0)
FAR = 0.02
"""How often another stream is the one that runs ahead."""
EARLY = 0.05
"""How often an operation runs though nobody waits."""


class _Here:
    """This thread's own, and a thread's that goes on in its context."""

    _engine: ContextVar["Engine | None"] = ContextVar("engine", default=None)

    @property
    def engine(self) -> "Engine":
        if (engine := self._engine.get()) is None:
            raise AttributeError("engine")
        return engine

    @engine.setter
    def engine(self, engine: "Engine") -> None:
        self._engine.set(engine)

    @engine.deleter
    def engine(self) -> None:
        self._engine.set(None)


_here: Any = _Here()
_current: ContextVar["Stream | None"] = ContextVar("current", default=None)


SECONDS = 30.0
"""That a host waits for what nobody does, on however busy a machine."""


class Mark:
    """A place in a stream."""

    passed = False

    def pass_(self) -> None:
        self.passed = True


class Engine:
    """All streams of one worker's device.

    Attributes:
        given_up: set where another worker has failed, for whom to wait there is no use.
        waits: what made the host wait for all that a stream had to do, and where; by an event, too, on the first
            stream, behind which no stream was given anything to do.
        given: operations so far, of all streams.
        pinned: memory of the host, by address.
        present_bytes: in tensors now, and the most so far.
        running: whether an operation is under way.
        kept: memory that was given back while other streams read it: until when, and what then becomes of it.
    """

    def __init__(self, seed: int, seconds: float = SECONDS) -> None:
        self.random, self.waits, self.seconds = random.Random(seed), list[str](), seconds
        self.given_up = threading.Event()
        self.pinned: dict[int, Tensor] = {}
        self.kept: list[tuple[list[Mark], Callable[[], None]]] = []
        self.present_bytes, self.peak_bytes, self.given, self.running = 0, 0, 0, False
        self._streams: list[Stream] = []
        self._made: dict[Hashable, Any] = {}
        self._ahead: Stream | None = None
        self.first = Stream(engine=self)

    @property
    def current(self) -> "Stream":
        """The stream that this thread queues to, as with torch each has its own."""
        stream = _current.get()
        return self.first if stream is None or stream.engine is not self else stream

    def takes(self, count: int) -> None:
        """So many bytes of memory more are somebody's, or fewer."""
        self.present_bytes += count
        self.peak_bytes = max(self.peak_bytes, self.present_bytes)

    def forget_peak(self) -> None:
        self.peak_bytes = self.present_bytes

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` returns, the first time."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def add(self, stream: "Stream") -> None:
        self._streams.append(stream)

    def step(self) -> bool:
        """One operation, if one may run."""
        ready = [stream for stream in self._streams if stream.queue and stream.queue[0][0]()]
        if not ready:
            return False
        if self._ahead not in ready or self.random.random() < FAR:
            self._ahead = self.random.choice(ready)
        assert self._ahead is not None
        _, run = self._ahead.queue.popleft()
        self.running = True
        try:
            with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
                run()
        finally:
            self.running = False
        free = [kept for kept in self.kept if all(mark.passed for mark in kept[0])]
        self.kept = [kept for kept in self.kept if kept not in free]
        for _, reuse in free:
            reuse()
        return True

    def until(self, done: Callable[[], bool]) -> None:
        """The host waits; what it waits for may need another worker."""
        end = time.monotonic() + self.seconds
        while not done():
            if not self.step():
                if self.given_up.is_set() or time.monotonic() > end:
                    raise RuntimeError("the device waits for what nobody does")
                time.sleep(1e-4)

    def finish(self) -> None:
        """Until nothing is left to be done."""
        self.until(lambda: not any(stream.queue for stream in self._streams))

    def host_waits(self, what: str) -> None:
        """For all of the current stream."""
        self.waits.append(f"{what} {_asked()}")
        stream, mark = self.current, Mark()
        stream.then(mark.pass_)
        self.until(lambda: mark.passed)


def _asked() -> str:
    """The line of the package that runs, else the one of whoever called torch."""
    frame, found = sys._getframe(1), ""
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(PACKAGE):
            return f"{path[len(PACKAGE) :]}:{frame.f_lineno}"
        if not found and "/tests/simulated/" not in path and "/torch/" not in path:
            found = f"{path}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return found


class Stream:
    """As torch's."""

    def __init__(self, device: torch.device | None = None, *, engine: Engine | None = None) -> None:
        self.engine: Engine = engine or _here.engine
        self.device = CUDA
        self.queue: deque[tuple[Callable[[], bool], Callable[[], object]]] = deque()
        self.engine.add(self)

    def then(self, run: Callable[[], object], ready: Callable[[], bool] = lambda: True) -> None:
        """Behind all that it has to do, and not before it's `ready`."""
        self.engine.given += 1
        self.queue.append((ready, run))
        # A collector may come by in any thread, and in the middle of an operation, behind which the next ones wait.
        if here() is self.engine and not self.engine.running and self.engine.random.random() < EARLY:
            self.engine.step()

    def takes(self) -> None:
        """Memory, now."""

    def reuses(self, run: Callable[[], object]) -> None:
        """`run`, which stands for whoever has memory that it took once and gave back: anybody, at once."""
        self.then(run)

    def behind(self, mark: Mark) -> None:
        """Whatever comes next waits until another stream has come there."""
        self.then(lambda: None, lambda: mark.passed)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        self.behind(event.mark)

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        with on(self):
            self.engine.host_waits("synchronize")

    def query(self) -> bool:
        return not self.queue


class Event:
    """As torch's; one that was never recorded has passed."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.mark = Mark()
        self.mark.passed = True
        self._recorded = -1

    def record(self, stream: Stream | None = None) -> None:
        self.mark = Mark()  # who waits already waits for what was recorded then
        stream = stream or _here.engine.current
        stream.then(self.mark.pass_)
        # On a stream beside it a host may wait for what came long before, as `Gauge` does.
        self._recorded = stream.engine.given if stream is stream.engine.first else -1

    def wait(self, stream: Stream | None = None) -> None:
        (stream or _here.engine.current).wait_event(self)

    def query(self) -> bool:
        return self.mark.passed

    def synchronize(self) -> None:
        """The host waits for this place alone. Where nothing was queued behind it, the device runs empty meanwhile."""
        if self._recorded == _here.engine.given:
            _here.engine.waits.append(f"event {_asked()}")
        mark = self.mark
        _here.engine.until(lambda: mark.passed)

    def elapsed_time(self, other: "Event") -> float:
        return 0.0


def here() -> Engine | None:
    """This thread's device, if it has a simulated one."""
    return getattr(_here, "engine", None)


def the() -> Engine:
    """This thread's device, which it must have."""
    engine: Engine = _here.engine
    return engine


def current() -> Stream:
    """The stream that this thread queues to."""
    stream: Stream = _here.engine.current
    return stream


@contextmanager
def on(stream: Stream) -> Iterator[None]:
    was = _current.get()
    _current.set(stream)
    try:
        yield
    finally:
        _current.set(was)


@contextmanager
def at(seed: int, seconds: float = SECONDS) -> Iterator[Engine]:
    """A device of this thread's own, whose schedule is drawn by `seed`."""
    _here.engine = engine = Engine(seed, seconds)
    try:
        yield engine
        engine.finish()
    finally:
        del _here.engine
