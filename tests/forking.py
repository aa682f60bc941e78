"""What a process does once before it forks workers: less is left for each of them to copy and to find out.

A fork copies the page tables, 8 bytes for 4 KiB of memory, and then each page that parent or child writes to: a count
of references is enough. With half a gigabyte of imported modules that costs a child more than the few steps it trains.
"""

import ctypes
import io
import sys
from functools import cache
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

HUGE_PAGE_BYTES = 2 << 20
MADV_COLLAPSE = 25  # Linux 6.1; an older kernel refuses it, and forks cost what they did


@cache
def prepare() -> None:
    """Train once here, which fills caches (plugins' entry points, abstract classes); then put the memory into huge
    pages, of which a fork copies one entry in place of 512."""
    module, file = BoringModel(), io.BytesIO()
    options = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
    Trainer(**options, devices=1, fast_dev_run=2).fit(module)
    torch.save(module.state_dict(), file)
    torch.load(io.BytesIO(file.getvalue()))
    if sys.platform == "linux":
        _collapse()


def _collapse() -> None:
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, mode, _, _, _, *name = line.split()
        if mode == "rw-p" and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in addresses.split("-"))
            start = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(max(end - start, 0)), MADV_COLLAPSE)
