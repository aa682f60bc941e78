"""Gradient-norm clipping in a pipeline: the norm is that of all stages' gradients, tied parameters counted once."""

from collections.abc import Mapping

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_decentral.pipeline.wire.ownership import Ownership
from lightning_decentral.pipeline.wire.stage_runner import StageRunner
from lightning_decentral.shared.compute.norms import squared_norm


class GlobalNorm:
    """norm = sqrt(sum over stages of ||g||^2), in the place of what Lightning measures on one stage."""

    def __init__(self, pipe: StageRunner, holdings: Ownership, precision: Precision, device: torch.device) -> None:
        self._pipe, self._holdings, self._precision, self._device = pipe, holdings, precision, device
        # On the instance, over its class's method: `close` has only to take it away.
        precision.clip_grad_by_norm = self._clip  # type: ignore[method-assign]

    def close(self) -> None:
        """Lightning's own again."""
        vars(self._precision).pop("clip_grad_by_norm", None)

    def _clip(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """g <- g min(1, clip_val / (norm + 1e-6))"""
        gradients = {p: p.grad for p in self._precision.main_params(optimizer) if p.grad is not None}
        # No `if norm > clip_val`, which would wait for the device.
        factor = (clip_val / (self._norm(gradients) + 1e-6)).clamp(max=1.0)
        for gradient in gradients.values():
            gradient.mul_(factor.to(gradient.dtype))

    def _norm(self, gradients: Mapping[nn.Parameter, Tensor]) -> Tensor:
        """Over all stages, tied ones once. Collective."""
        counted = set(self._holdings.counted)
        # With a zero: a stage without gradients takes part in the sum all the same.
        mine = [torch.zeros((), device=self._device), *(g.detach() for p, g in gradients.items() if p in counted)]
        return self._pipe.total(squared_norm(mine)).sqrt()
