"""Operators of our own, which go over their tensors once: a Triton kernel on a device, torch's operations elsewhere.

    correct_ = operator("correct_(Tensor(a!) x, ...) -> ()", in_torch)

To torch they are operators as any: a dispatch mode counts them, a simulated device queues them. The kernels have the
same names in `triton_kernels`; what they don't serve (a type, a size), and every other device, takes torch's.

Short, and a module of its own: who has an operator knows nothing of Triton.
"""

import importlib
import warnings
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch

FACTOR = 1e9
"""Over so many times the median of the workers a magnitude is absurd, and its message is refused (`health.sound`). A
variance may honestly be the square of 30000 times another worker's deviation; parameters never come near."""

_library = torch.library.Library("lightning_decentral", "FRAGMENT")


def operator(schema: str, in_torch: Callable[..., None]) -> Callable[..., None]:
    """An operator without a result, which changes its first argument: of a schema as torch.library takes it, and
    `in_torch`, the same by torch's operations, on any device."""
    name = schema.partition("(")[0]

    def run(*args: Any) -> None:
        found = kernels(args[0].device) if args[0].device.type == "cuda" else None
        if found is None or not getattr(found, name)(*args):  # no Triton, or a type or size that it doesn't serve
            in_torch(*args)

    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    made: Callable[..., None] = getattr(torch.ops.lightning_decentral, name)
    return made


@cache
def kernels(device: torch.device) -> ModuleType | None:
    """The Triton kernels; None, with a warning, where there is no Triton or it can't compile."""
    try:
        found = importlib.import_module("lightning_decentral.shared.compute.triton_kernels")
        found.try_out(device)
    except Exception as error:  # whatever a compiler raises: training goes on without it
        warnings.warn(
            f"Triton doesn't work here ({type(error).__name__}: {error}), so a round of gossip goes over the "
            "parameters twice as often as it could: install triton and a C compiler",
            stacklevel=2,
        )
        return None
    return found
