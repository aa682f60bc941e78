"""Parameter groups: checks of options, batches of tensors for foreach calls, complex tensors viewed as real ones."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Betas = tuple[float, float]


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError if lr, eps, weight_decay or betas are out of range."""
    for name in ("lr", "eps", "weight_decay"):
        if not 0 <= options[name] < math.inf:
            raise ValueError(f"{name} must be a number from 0 up, got {options[name]}: leave it out for the default")
    for name, beta in zip(("betas[0]", "betas[1]"), options["betas"], strict=True):
        if not 0 <= beta < 1:
            raise ValueError(f"{name} must be in [0, 1), got {beta}: 0.9 and 0.999 are usual")


def refuse_sparse(optimizer: Optimizer, gradient: Tensor) -> None:
    """Raise RuntimeError for a sparse gradient."""
    if gradient.is_sparse:
        raise RuntimeError(f"{type(optimizer).__name__} takes no sparse gradients: use torch.optim.SparseAdam")


def together(
    optimizer: Optimizer, group: Mapping[str, Any], start: Callable[[Tensor], dict[str, Any]]
) -> list[list[Tensor]]:
    """Batch a group's parameters with a gradient for foreach calls: by device, type and number of steps taken. Without
    `foreach`, which None turns on for a CUDA device, each parameter is a batch. `start` makes the state of a parameter
    that had no gradient before. RuntimeError: a gradient is sparse."""
    batches: dict[tuple[Any, ...], list[Tensor]] = {}
    for place, parameter in enumerate(group["params"]):
        if parameter.grad is None:
            continue
        refuse_sparse(optimizer, parameter.grad)
        state = optimizer.state[parameter]
        if not state:
            state.update(start(parameter))
        foreach = parameter.device.type == "cuda" if group["foreach"] is None else group["foreach"]
        # Its index makes a parameter a batch of its own.
        key = (parameter.device, parameter.dtype, state["step"], None if foreach else place)
        batches.setdefault(key, []).append(parameter)
    return list(batches.values())


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """Call the closure with gradients enabled, and return its result; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def real(tensors: list[Tensor]) -> list[Tensor]:
    """View complex tensors as pairs of real numbers, each a coordinate of its own."""
    return [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
