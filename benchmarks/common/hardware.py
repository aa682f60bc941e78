"""What a result was measured on: its file name and its first lines."""

import os
import platform
from collections.abc import Mapping
from pathlib import Path

import lightning
import torch

from lightning_decentral.shared.compute.hardware import processor


def description() -> dict[str, str]:
    """Processor or device, cores, memory, versions; nothing that names the host."""
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "processor": processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "devices": ", ".join(devices) or "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
    }


def sentence(of: Mapping[str, str] | None = None) -> str:
    """The description of this machine, or one that a result holds, in a line for pages."""
    return ", ".join(f"{key} {value}" for key, value in (of or description()).items())


def slug() -> str:
    """Short, for a file name: "2-cores" or "nvidia-h200"."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0).lower().replace(" ", "-")
    return f"{len(os.sched_getaffinity(0))}-cores"


def machine_seconds() -> float:
    """Processor seconds that the whole machine has spent so far, and that its host took from it (Linux)."""
    counts = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(counts) - counts[3] - counts[4]) / os.sysconf("SC_CLK_TCK")


def waited_seconds() -> float:
    """Seconds so far in which this process's first thread could have run and had no processor (Linux)."""
    return float(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9


def come_first() -> None:
    """Give this process, and the session that it began, priority over other work on the machine; needs root."""
    os.nice(-15)
    if (session := Path("/proc/self/autogroup")).exists():
        session.write_text("-15")
