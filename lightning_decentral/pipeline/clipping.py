"""Gradient-norm clipping in a pipeline: the norm is that of all stages' gradients, tied parameters counted once."""

from collections.abc import Sequence

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import Optimizer

from lightning_decentral.optim.quasi_global import QuasiGlobalAdam
from lightning_decentral.pipeline.wire.ownership import Ownership
from lightning_decentral.pipeline.wire.stage_runner import StageRunner
from lightning_decentral.shared.compute.norms import squared_norm


class GlobalNorm:
    """norm = sqrt(sum over stages of ||g||^2), in the place of what Lightning and optimizers measure on one stage."""

    def __init__(
        self,
        pipe: StageRunner,
        holdings: Ownership,
        precision: Precision,
        optimizers: Sequence[Optimizer],
        device: torch.device,
    ) -> None:
        self._pipe, self._holdings, self._precision, self._device = pipe, holdings, precision, device
        self._measuring = [optimizer for optimizer in optimizers if isinstance(optimizer, QuasiGlobalAdam)]
        # On the instances, over their classes' methods: `close` has only to take them away.
        precision.clip_grad_by_norm = self._clip  # type: ignore[method-assign]
        for optimizer in self._measuring:
            optimizer.norm = self._norm  # type: ignore[method-assign]

    def close(self) -> None:
        """Lightning's and the optimizers' own again."""
        for owner, name in [(self._precision, "clip_grad_by_norm"), *((o, "norm") for o in self._measuring)]:
            vars(owner).pop(name, None)

    def _clip(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """g <- g min(1, clip_val / (norm + 1e-6))"""
        parameters = [p for p in self._precision.main_params(optimizer) if p.grad is not None]
        norm = self._norm(parameters, [p.grad for p in parameters if p.grad is not None])
        # No `if norm > clip_val`, which would wait for the device.
        factor = (clip_val / (norm + 1e-6)).clamp(max=1.0)
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(factor.to(parameter.grad.dtype))

    def _norm(self, parameters: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor:
        """Of a tensor for each of these parameters, over all stages, tied ones once. Collective."""
        counted = set(self._holdings.counted)
        pairs = zip(parameters, tensors, strict=True)
        # With a zero: a stage without gradients takes part in the sum all the same.
        mine = [torch.zeros((), device=self._device), *(t.detach() for p, t in pairs if p in counted)]
        return self._pipe.total(squared_norm(mine)).sqrt()
