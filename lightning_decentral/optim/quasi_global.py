"""Quasi-global momentum for Adam: moments follow where a worker went together with its neighbours."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_decentral.optim.groups import Betas, check_options, evaluated, real, together
from lightning_decentral.shared.plan.arguments import checked

SMALLEST_NORM = 1e-8


@checked
class QuasiGlobalAdam(Optimizer):
    """Both moments of Adam from the normalized displacement after mixing (QG-DAdam); the own gradient enters one step.

        d  = (x' - x) / (||x' - x|| + 1e-8)      x' before this optimizer's last step, x now: what was mixed is in it
        m <- b1 m + (1 - b1) d
        v <- b2 v + (1 - b2) d^2
        g <- g + weight_decay x
        m^ = b1 m + g;  v^ = b2 v + (1 - b2) g^2
        x' <- x
        x <- x - lr (m^ / (1 - b1^t)) / (sqrt(v^ / (1 - b2^t)) + eps)            t the step from 1, m = v = 0 there

    The norm is over all parameters of the worker that have a gradient, wherever its model lies (shards, stages). The
    neighbours' part of d is what landed between two steps: the last update's round where gossip blocks (delay 0), which
    is the source's order, the round before it where it overlaps. Where nothing is mixed between two steps (one worker,
    `ddp`), d is the step's own.

    d has length 1 and g does not, so unlike Adam's the step depends on the scale of the loss: tune `lr` anew. No rule
    with a momentum of displacements (`QuasiGlobalMomentum`) beside it.

    Args:
        lr: learning rate.
        betas: (b1, b2), in [0, 1).
        eps: added to the root, in units of the gradient.
        weight_decay: weight_decay * x is added to the gradient.

    Memory: 3 copies of the parameters (m, v, x'), and 3 more while stepping.

    Raises:
        ValueError: an argument out of range.
        RuntimeError: a sparse gradient.

    Source: Lin et al. 2102.04761, QG-DAdam, as the authors' code has it (epfml/quasi-global-momentum,
    decentralized_qg_adam.py): g enters m^ with weight 1.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = evaluated(closure)
        batches = [(group, parameters) for group in self.param_groups for parameters in together(self, group, _begin)]
        # The ways of all groups come before the first move: one length is over all of them.
        ways = [list(torch._foreach_sub(self._real("start", p), real(p))) for _, p in batches]
        moved = [parameter for _, parameters in batches for parameter in parameters]
        length = self.norm(moved, [way for batch in ways for way in batch]) + SMALLEST_NORM
        for (group, parameters), way in zip(batches, ways, strict=True):
            self._learn(parameters, group["betas"], way, length)
            self._move(parameters, group)
        return loss

    def norm(self, parameters: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor:
        """Of a tensor for each of these parameters, at least in single precision. Where a model is spread over
        processes, its strategy puts the norm over all of them here."""
        if not tensors:
            return torch.zeros(())
        parts = [torch.linalg.vector_norm(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in tensors]
        length: Tensor = torch.linalg.vector_norm(torch.stack([part.to(tensors[0].device) for part in parts]))
        return length

    def _real(self, name: str, parameters: list[Tensor]) -> list[Tensor]:
        return real([self.state[p][name] for p in parameters])

    def _learn(self, parameters: list[Tensor], betas: Betas, way: list[Tensor], length: Tensor) -> None:
        """The moments take in d; x' <- x."""
        torch._foreach_div_(way, length.to(way[0].device))
        means, squares = self._real("exp_avg", parameters), self._real("exp_avg_sq", parameters)
        torch._foreach_lerp_(means, way, 1 - betas[0])
        torch._foreach_mul_(squares, betas[1])
        torch._foreach_addcmul_(squares, way, way, value=1 - betas[1])
        for parameter in parameters:  # shards have no foreach copy
            self.state[parameter]["start"].copy_(parameter)

    def _move(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """The step from m^ and v^, which are not kept."""
        beta1, beta2 = group["betas"]
        for parameter in parameters:
            self.state[parameter]["step"] += 1
        step: int = self.state[parameters[0]]["step"]
        x, gradients = real(parameters), real([p.grad for p in parameters if p.grad is not None])
        # Not in place: the gradients are the user's.
        if group["weight_decay"]:
            gradients = list(torch._foreach_add(gradients, x, alpha=group["weight_decay"]))
        mean = torch._foreach_mul(self._real("exp_avg", parameters), beta1)
        torch._foreach_add_(mean, gradients)
        root = torch._foreach_mul(self._real("exp_avg_sq", parameters), beta2)
        torch._foreach_addcmul_(root, gradients, gradients, value=1 - beta2)
        torch._foreach_sqrt_(root)
        torch._foreach_div_(root, math.sqrt(1 - beta2**step))
        torch._foreach_add_(root, group["eps"])
        torch._foreach_addcdiv_(x, mean, root, value=-group["lr"] / (1 - beta1**step))


def _begin(parameter: Tensor) -> dict[str, Any]:
    square = torch.view_as_real(parameter) if parameter.is_complex() else parameter
    return {
        # A plain number, which no device has to be asked for.
        "step": 0,
        "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(square, memory_format=torch.preserve_format),
        # No way has been gone: the first d is 0.
        "start": parameter.clone(memory_format=torch.preserve_format),
    }
