"""Seconds that a worker waited, on the host or on its device."""

from collections import deque
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
