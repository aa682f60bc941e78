"""Device names of a sweep: "cpu:0", "cuda:1".

A module of its own, however short: launcher, server and trainings all name devices, and a test of names needs no sweep.
"""

import os
from collections.abc import Mapping, Sequence


def slots(devices: int | Sequence[str] | None, gpus: int) -> tuple[str, ...]:
    """The named ones; or so many GPUs; or where there are none, so many equal parts of the processor.

    None: every GPU, or the whole processor.

    Raises:
        ValueError: fewer than one, more than there are, named twice, or of another kind.
    """
    count = max(1, gpus) if devices is None else devices
    if isinstance(count, int):
        if count < 1:
            raise ValueError(f"hydra.launcher.devices={count}: a sweep needs at least 1")
        if 0 < gpus < count:
            raise ValueError(
                f"hydra.launcher.devices={count}, this machine has {gpus} GPU(s): use {gpus}, or name parts of the "
                f"processor: hydra.launcher.devices=[{','.join(['cpu'] * count)}]"
            )
        count = ["cuda" if gpus else "cpu"] * count
    return _numbered(count, gpus)


def _numbered(names: Sequence[str], gpus: int) -> tuple[str, ...]:
    found = [name if ":" in name else f"{name}:{i}" for i, name in enumerate(names)]
    known = {f"cuda:{i}" for i in range(gpus)}
    wrong = [name for name in found if name not in known and name.partition(":")[0] != "cpu"]
    if not found or wrong or len(set(found)) < len(found):
        there = ", ".join(sorted(known)) or "no GPU"
        raise ValueError(
            f"hydra.launcher.devices={list(names)}: name each device once, from cpu and what is here ({there})"
        )
    return tuple(found)


def environment(devices: Sequence[str], visible: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment that shows a process these GPUs only, of those that this process sees."""
    numbers = [int(device.partition(":")[2]) for device in devices if device.startswith("cuda")]
    seen = visible.get("CUDA_VISIBLE_DEVICES")
    names = [str(n) if seen is None else seen.split(",")[n] for n in numbers]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names)} if names else {}
