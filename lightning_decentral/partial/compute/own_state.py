"""Own state of a module's Python side: counters, queues and generators that a step changes, put back for the next run.

Buffers and the generators of torch, numpy and Python are put back elsewhere; what a step keeps outside of its module
isn't seen.
"""

import copy
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

PLAIN = (bool, int, float, complex, str, bytes, type(None))
HOLDING = (list, tuple, dict, set, deque)
DRAWING = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
LONGEST = 10_000
"""A longer list is data, not what a step counts or keeps: it would be copied for every run."""


def own_state(module: nn.Module) -> Callable[[], None]:
    """A function that gives every part of the module the plain attributes that it has now."""
    # Tensors and modules that a list refers to are put back as what they are, not as copies.
    held = {id(one): one for one in (*module.modules(), *module.parameters(), *module.buffers())}
    saved = [(vars(part), _copied(_state(part), held)) for part in module.modules()]

    def put_back() -> None:
        for attributes, before in saved:
            for name in [name for name, value in attributes.items() if _is_state(name, value) and name not in before]:
                del attributes[name]
            attributes.update(_copied(before, held))

    return put_back


def _state(part: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(part).items() if _is_state(name, value)}


def _is_state(name: str, value: Any) -> bool:
    if name.startswith("_") or name == "training":
        return False  # torch's and Lightning's own
    return isinstance(value, (*PLAIN, *DRAWING)) or (isinstance(value, HOLDING) and len(value) <= LONGEST)


def _copied(state: dict[str, Any], held: dict[int, Any]) -> dict[str, Any]:
    found = {}
    for name, value in state.items():
        try:
            found[name] = copy.deepcopy(value, dict(held))
        except (RuntimeError, TypeError):  # a file, a lock: it stays as a step leaves it
            continue
    return found


@torch.no_grad()
def write_back(buffer: Tensor, value: Tensor) -> None:
    """buffer <- value, where it has changed. Others may be of a kind that can't be written: expanded, sparse."""
    if buffer.layout is not torch.strided:
        return
    if buffer.shape != value.shape or not torch.equal(buffer.nan_to_num(), value.nan_to_num()):
        buffer.resize_(value.shape).copy_(value)
