"""Clocks and reads of a device (CPU or CUDA): stopwatches, laps, late reads without a sync, its name."""

import os
import platform
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_decentral.shared.compute.worker_thread import WorkerThread


class HostStopwatch:
    """Sums wall seconds between `start` and `stop`."""

    def __init__(self) -> None:
        self._total = 0.0
        self._started = 0.0

    def start(self) -> None:
        self._started = perf_counter()

    def stop(self) -> None:
        self._total += perf_counter() - self._started

    def seconds(self) -> float:
        return self._total


OPEN = 64
"""Intervals that a device's stopwatch keeps before it looks which of them are over."""


class DeviceStopwatch:
    """Sums device seconds between `start` and `stop` on the current stream, by events, without making the host wait."""

    def __init__(self) -> None:
        self._total = 0.0
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._spare: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> None:
        pair = self._spare.pop() if self._spare else (_timed_event(), _timed_event())
        pair[0].record()
        self._open.append(pair)

    def stop(self) -> None:
        self._open[-1][1].record()
        if len(self._open) > OPEN:  # nobody may ever ask for the seconds
            self.seconds()

    def seconds(self) -> float:
        """All intervals that the device has passed so far."""
        while self._open and self._open[0][1].query():
            start, stop = pair = self._open.popleft()
            self._total += start.elapsed_time(stop) / 1000.0
            self._spare.append(pair)
        return self._total


def _timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def stopwatch(device: torch.device) -> HostStopwatch | DeviceStopwatch:
    """The stopwatch that sees waiting on `device`."""
    # A host clock would see nothing of a device: waiting for NCCL only queues a wait on the stream.
    return DeviceStopwatch() if device.type == "cuda" else HostStopwatch()


class HostLaps:
    """Wall seconds of laps."""

    def __init__(self) -> None:
        self._stamps: list[float] = []

    def lap(self) -> int:
        """One more; its number, from 0."""
        self._stamps.append(perf_counter())
        return len(self._stamps) - 1

    def seconds(self) -> list[float]:
        """Of every lap since the first."""
        return [stamp - self._stamps[0] for stamp in self._stamps]


class DeviceLaps:
    """Device seconds of laps on the current stream, by events: the host doesn't wait before `seconds`."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []

    def lap(self) -> int:
        """One more; its number, from 0."""
        self._events.append(torch.cuda.Event(enable_timing=True))
        self._events[-1].record()
        return len(self._events) - 1

    def seconds(self) -> list[float]:
        """Of every lap since the first, once the device has passed the last."""
        for event in self._events:
            event.synchronize()
        return [self._events[0].elapsed_time(event) / 1000.0 for event in self._events]


def laps(device: torch.device) -> HostLaps | DeviceLaps:
    """The laps that see what `device` does."""
    return DeviceLaps() if device.type == "cuda" else HostLaps()


def duration(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, until the device has done what it asked for."""
    watch = laps(device)
    watch.lap()
    call()
    watch.lap()
    return watch.seconds()[-1]


class AsyncRead:
    """A small tensor on its way to the host.

    One of the host is there at once. From a device it is copied behind what the current stream has to do.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.on_host = not tensor.is_cuda
        self._tensor = tensor
        if tensor.is_cuda:
            self._source = tensor  # its memory is not to be used again before the copy is done
            self._tensor = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
            # An event for this copy alone: `read` doesn't wait for what is queued after it.
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> Tensor:
        if not self.on_host:
            self._arrived.synchronize()
        return self._tensor


def beside(device: torch.device) -> AbstractContextManager[Any]:
    """What is queued inside has a stream of its own on a CUDA device, and doesn't wait for the other's work."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


class Doing(Protocol):
    """A call under way beside the training."""

    def result(self) -> Any:
        """What it returned, or its error, once it's done; on a device the current stream waits, not the host."""

    def done(self) -> bool:
        """Whether `result` would return at once."""


class Stage(Protocol):
    """Where calls are done in order, beside the training."""

    def send(self, call: Callable[[], Any]) -> Doing:
        """Do it after all that was sent before."""


class StreamStage:
    """A stream of a CUDA device. What is sent sees what the current stream has queued until then."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def send(self, call: Callable[[], Any]) -> Doing:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream), torch.no_grad():
            return Queued(call(), self._stream.record_event())


class Queued:
    """A call that a stream has taken in."""

    def __init__(self, value: Any, event: torch.cuda.Event) -> None:
        self._value, self._event = value, event
        self.done = event.query

    def result(self) -> Any:
        torch.cuda.current_stream().wait_event(self._event)
        return self._value


def stage(device: torch.device, name: str) -> Stage:
    """A thread of the host for work on its tensors, a stream for a device's."""
    return StreamStage(device) if device.type == "cuda" else WorkerThread(name)


def device_name(device: torch.device) -> str:
    """The device's own name, or the processor and how many of its cores this process may use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor()}, {cores()} cores"


def cores() -> int:
    """How many this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def processor() -> str:
    """Its name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
