"""Seconds on the host or on its device: that a worker waited, and from lap to lap."""

from collections import deque
from collections.abc import Callable
from time import perf_counter

import torch


class HostStopwatch:
    """Sums wall seconds between `start` and `stop`."""

    def __init__(self) -> None:
        self._total = 0.0
        self._started = 0.0

    def start(self) -> None:
        """Begin one interval."""
        self._started = perf_counter()

    def stop(self) -> None:
        """End the interval."""
        self._total += perf_counter() - self._started

    def seconds(self) -> float:
        """All intervals so far."""
        return self._total


class DeviceStopwatch:
    """Sums device seconds between `start` and `stop` on the current stream, by events, without making the host wait.

    A host clock would see nothing: waiting for NCCL only queues a wait on the stream. Intervals count once the device
    passed them.
    """

    def __init__(self) -> None:
        self._total = 0.0
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def start(self) -> None:
        """Begin one interval."""
        pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        pair[0].record()
        self._open.append(pair)

    def stop(self) -> None:
        """End the interval."""
        self._open[-1][1].record()

    def seconds(self) -> float:
        """All intervals that the device has passed so far."""
        while self._open and self._open[0][1].query():
            start, stop = self._open.popleft()
            self._total += start.elapsed_time(stop) / 1000.0
        return self._total


def stopwatch(device: torch.device) -> HostStopwatch | DeviceStopwatch:
    """The stopwatch that sees waiting on `device`."""
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
