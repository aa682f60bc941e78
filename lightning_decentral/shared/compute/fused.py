"""Fused operators, which read and write their tensors once: a Triton kernel on CUDA, torch's operations elsewhere.

    correct_ = operator("correct_(Tensor(a!) x, ...) -> ()", in_torch)

They are registered as torch operators: a dispatch mode counts them, a simulated device queues them. The kernels have
the same names in `triton_kernels`; types and sizes without a kernel, and every other device, use torch's operations.

This short module stands alone so that code which calls an operator doesn't import Triton."""

import importlib
import warnings
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch

FACTOR = 1e9
"""A message with a magnitude over FACTOR times the workers' median is refused (`health.sound`). Adam's second moments
may rightly be the square of 30000 times another worker's gradients; parameters never come near."""

_library = torch.library.Library("lightning_decentral", "FRAGMENT")


def operator(schema: str, in_torch: Callable[..., None]) -> Callable[..., None]:
    """Register an operator without a result, which changes its first argument. `schema`: as torch.library takes it;
    `in_torch`: the same computation by torch's operations, on any device."""
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
    """Return the module of Triton kernels; None, with a warning, where Triton is missing or can't compile."""
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
