"""Worker state: what a worker needs to resume exactly (random state too), and where: `NAME.ckpt.workers/worker-0-of-4`.

A worker's file is a complete Lightning checkpoint of that worker's own model, plus its random state and its messages
in flight.
"""

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

KEY = "lightning_decentral"
VERSION = 1


def folder(checkpoint_path: str | Path) -> str:
    """The folder of the workers' files of one checkpoint; a link (`save_last="link"`) leads to its target's."""
    path = os.fspath(checkpoint_path)
    return f"{os.path.realpath(path) if os.path.islink(path) else path}.workers"


def file(checkpoint_path: str | Path, rank: int, size: int) -> str:
    """One worker's file."""
    return os.path.join(folder(checkpoint_path), f"worker-{rank}-of-{size}.ckpt")


def random_state() -> dict[str, Any]:
    """The state of the generators of torch (host and devices), numpy and Python."""
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, python_gauss = random.getstate()
    # Tensors and primitives only, so that a file loads with `weights_only=True`.
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss), float(gauss)],
        "python": [version, list(internal), python_gauss],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Go on drawing where `random_state` was taken."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, internal, python_gauss = state["python"]
    random.setstate((version, tuple(internal), python_gauss))
