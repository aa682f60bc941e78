"""What a process computes on, in words."""

import os
import platform
from pathlib import Path

import torch


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
