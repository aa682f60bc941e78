"""Measures time on a host or device, and names the hardware: laps, durations, device name, processor cores."""

import os
import platform
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch

from lightning_decentral.shared.compute import cuda


class HostLaps:
    """Measures laps by the host's clock."""

    def __init__(self) -> None:
        self._stamps: list[Any] = []

    def lap(self) -> int:
        """Record a lap and return its number, from 0."""
        self._stamps.append(self._now())
        return len(self._stamps) - 1

    def _now(self) -> Any:
        return perf_counter()

    def seconds(self) -> list[float]:
        """Return the wall seconds of every lap since the first."""
        return [stamp - self._stamps[0] for stamp in self._stamps]


class DeviceLaps(HostLaps):
    """Measures laps on a device's current stream by events: the host doesn't wait before `seconds`."""

    def _now(self) -> cuda.Event:
        event = cuda.Event(enable_timing=True)
        event.record()  # queued on the current stream, no wait
        return event

    def seconds(self) -> list[float]:
        """Wait for the device, and return the device seconds of every lap since the first."""
        for event in self._stamps:
            event.synchronize()
        return [self._stamps[0].elapsed_time(event) / 1000.0 for event in self._stamps]  # milliseconds -> seconds


class ProcessorTime:
    """Measures wall seconds, and processor seconds of all threads of this process, between `start` and `stop`."""

    def __init__(self) -> None:
        self._wall, self._busy = 0.0, 0.0

    def start(self) -> None:
        self._begun = perf_counter(), process_time()

    def stop(self) -> None:
        wall, busy = self._begun
        self._wall, self._busy = self._wall + perf_counter() - wall, self._busy + process_time() - busy

    @property
    def crowding(self) -> float:
        """Wall seconds for each processor second: 1 alone on a processor, 2 where two processes share a processor, 1/4
        where four threads compute at once. 1 before anything was measured."""
        return self._wall / self._busy if self._busy else 1.0


def laps(device: torch.device) -> HostLaps:
    """Return a lap timer for work on this device."""
    return DeviceLaps() if device.type == "cuda" else HostLaps()


def duration(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call, until the device has finished the work that it queued."""
    watch = laps(device)
    watch.lap()
    call()
    watch.lap()
    return watch.seconds()[-1]


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or the processor's with the number of cores that this process may use."""
    if device.type == "cuda":
        return cuda.device_name(device)
    return f"{processor()}, {cores()} cores"


def cores() -> int:
    """Return the number of processor cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))  # fewer than there are under taskset, SLURM, cgroups' cpusets
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def processor() -> str:
    """Return the processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
