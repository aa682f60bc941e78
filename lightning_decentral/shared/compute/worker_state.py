"""Worker state: metadata that every file has about itself, and the state of a worker's random generators.

A worker's file is a complete Lightning checkpoint of that worker's own model, plus its random state and its messages
in flight. The metadata is the file's mark: format, package, who wrote it in which save, and a digest.
"""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from lightning_decentral.shared.compute import cuda
from lightning_decentral.shared.compute.digest import digest

KEY = "lightning_decentral"
VERSION = 3


def sealed(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The same with the digest of its contents in its mark."""
    return {**checkpoint, KEY: {**checkpoint[KEY], "digest": digest(checkpoint)}}


def damage(checkpoint: Mapping[str, Any]) -> str | None:
    """The reason why the contents are damaged; None where they aren't, or where no digest was kept."""
    mark = checkpoint.get(KEY) or {}
    kept = mark.get("digest")
    rest = {key: value for key, value in mark.items() if key != "digest"}
    if kept is None or digest({**checkpoint, KEY: rest}) == kept:
        return None
    return "its digest is another"


def random_state() -> dict[str, Any]:
    """The state of the generators of torch (host and devices), numpy and Python."""
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, python_gauss = random.getstate()
    # Tensors and primitives only, so that a file loads with `weights_only=True`.
    return {
        "torch": torch.get_rng_state(),
        "cuda": cuda.random_states(),
        "numpy": [torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss), float(gauss)],
        "python": [version, list(internal), python_gauss],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Go on drawing where `random_state` was taken."""
    torch.set_rng_state(state["torch"])
    cuda.set_random_states(state["cuda"])
    keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, internal, python_gauss = state["python"]
    random.setstate((version, tuple(internal), python_gauss))
