"""What the hardware is called and how fast it is: laps and durations of a device, its name, its processor's cores."""

import os
import platform
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch

from lightning_decentral.shared.compute import cuda


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
        self._events: list[cuda.Event] = []

    def lap(self) -> int:
        """One more; its number, from 0."""
        self._events.append(cuda.Event(enable_timing=True))
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


def device_name(device: torch.device) -> str:
    """The device's own name, or the processor and how many of its cores this process may use."""
    if device.type == "cuda":
        return cuda.device_name(device)
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
