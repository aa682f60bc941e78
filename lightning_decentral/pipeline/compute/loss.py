"""Loss normalization over micro-batches: the batch's loss is the mean over all tokens.

    loss = sum_m (n_m / N) loss_m,   N = sum_m n_m,   n_m: targets of micro-batch m that aren't ignored

The mean of the micro-batches' means would weight a padded micro-batch too much."""

import inspect
from contextlib import ContextDecorator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

COUNTED = {loss: inspect.signature(loss) for loss in (functional.cross_entropy, functional.nll_loss)}


class TargetCount(TorchFunctionMode, ContextDecorator):
    """Context or decorator that finds means of cross-entropy or negative log-likelihood, and the number of targets in
    each."""

    def __init__(self) -> None:
        super().__init__()
        self._means: list[tuple[Tensor, Tensor, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in COUNTED:
            given = COUNTED[func].bind(*args, **(kwargs or {}))
            given.apply_defaults()
            mean, target, weight = (given.arguments[name] for name in ("reduction", "target", "weight"))
            # Classes with weights and soft targets have means over something else than a number of targets.
            if mean == "mean" and weight is None and not target.is_floating_point():
                self._means.append((result, target, given.arguments["ignore_index"]))
        return result

    def targets(self, loss: Tensor) -> Tensor | None:  # ()
        """Number of targets, without ignored targets, that `loss` is the mean over: a scalar on their device, the host
        doesn't wait. None if the loss isn't known to be a mean."""
        for value, target, ignore_index in self._means:
            if value is loss or (value.grad_fn is not None and value.grad_fn is loss.grad_fn):
                return (target != ignore_index).sum()
        return None


def weighed(loss: Tensor, weight: Tensor) -> Tensor:  # (..), broadcast
    """Return weight * loss, or zero with zero gradients where there is no target and the mean is nan."""
    return torch.where(weight > 0, loss, 0.0) * weight


def total(weights: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """sum_m weight_m value_m / sum_m weight_m along the last axis, and 1 / sum_m weight_m, the factor for the gradients
    of weighted losses. A batch without targets gives (nan, 0).

        weight_m = n_m / T   with T all positions of the batch

    Args:
        weights: [M]
        values: [..., M]; nan for micro-batches without targets.
    """
    whole = weights.sum()
    return weighed(values, weights).sum(-1) / whole, torch.where(whole > 0, 1 / whole, 0.0)
