"""Muon: orthogonal steps for hidden matrices, AdamW for embeddings, heads and vectors, in one optimizer.

Muon's step has the same length however noisy a worker's gradient is, as gossip needs; Adam's step gets shorter.
`muon_groups(module)` sorts parameters into groups."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from lightning_decentral.optim.groups import Betas, check_options, evaluated, refuse_sparse
from lightning_decentral.optim.newton_schulz import orthogonalize
from lightning_decentral.shared.plan.arguments import checked

LIKE_ADAMW = 0.2  # root mean square of a usual update of AdamW, in units of the learning rate
Dtype = Literal["bfloat16", "float32", "float64"]
TYPES: dict[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


@checked
class Muon(Optimizer):
    """Muon for groups with `hidden`, AdamW for the others, at one learning rate.

        m <- momentum m + (1 - momentum) g
        u  = momentum m + (1 - momentum) g                       Nesterov's
        x <- (1 - lr weight_decay) x - lr 0.2 sqrt(max(rows, columns)) newton_schulz(u)

    So an update has a root mean square of about 0.2 lr, as AdamW's has, and one learning rate suits both. A filter
    [out, in, ...] is a matrix [out, rest]. A parameter without gradient is skipped.

    Args:
        params: parameter groups, as `muon_groups(module)` returns; a group without `hidden` counts as hidden.
        lr: learning rate.
        momentum: momentum of hidden matrices, in [0, 1). For small batches 0.8 was best under `ddp` and 0.9 under
            gossip; for large batches 0.95 is usual.
        betas: AdamW's betas.
        eps: AdamW's eps, in units of the gradient.
        weight_decay: decoupled weight decay, for both.
        steps: iterations of Newton-Schulz.
        dtype: name of the type in which Newton-Schulz computes; None: bfloat16 on GPUs, float32 on the CPU. On a CPU
            that multiplies bfloat16 (AMX), "bfloat16" is several times faster for sides of some hundreds.
        foreach: AdamW's foreach; None: torch's choice.

    Memory: a copy of the hidden matrices and two of the rest; during a step a copy of a group's hidden matrices, and
    five of the matrices in one call of Newton-Schulz (64 MiB on GPUs, 1 MiB on the CPU, or one matrix).

    Raises:
        ValueError: an argument out of range, or a hidden parameter that is no real matrix.
        RuntimeError: a sparse gradient.

    Source: Jordan et al., Muon (kellerjordan.github.io/posts/muon, 2024); the scale Liu et al. 2502.16982, section 2.2.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 2e-2,
        momentum: float = 0.8,
        betas: Betas = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        steps: int = 5,
        dtype: Dtype | None = None,
        foreach: bool | None = None,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        defaults |= {"steps": steps, "dtype": dtype, "foreach": foreach, "hidden": True}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        options = {**self.defaults, **param_group}
        check_options(options)
        if not 0 <= options["momentum"] < 1:
            best = "in small batches 0.8 was best under ddp and 0.9 under gossip, in large ones 0.95 is usual"
            raise ValueError(f"momentum must be in [0, 1), got {options['momentum']}: {best}")
        if options["steps"] < 1 or options["steps"] != int(options["steps"]):
            raise ValueError(f"steps must be a whole number from 1 up, got {options['steps']}: 5 are usual")
        if options["dtype"] is not None and options["dtype"] not in TYPES:
            raise ValueError(f"dtype must be one of {', '.join(TYPES)}, got {options['dtype']!r}")
        given = param_group["params"]
        if not isinstance(given, set):  # torch refuses these; an iterator is read once
            param_group["params"] = given = [given] if isinstance(given, Tensor) else list(given)
        for one in given if options["hidden"] else []:
            parameter = one[1] if isinstance(one, tuple) else one
            if isinstance(parameter, Tensor) and (parameter.ndim < 2 or parameter.is_complex()):
                raise ValueError(
                    f"a hidden parameter of shape {tuple(parameter.shape)}, {parameter.dtype}, is no real matrix: give "
                    "Muon(muon_groups(self)), or hidden=False in its group"
                )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = evaluated(closure)
        for group in self.param_groups:
            given = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in given:
                refuse_sparse(self, parameter.grad)
            if given:
                (self._turn if group["hidden"] else self._adapt)(given, group)
        return loss

    def change(self, tensors: Sequence[Tensor], change: Callable[[Sequence[Tensor]], None]) -> None:
        """Run a function that changes whole tensors in place. Strategies that shard parameters replace this method."""
        change(tensors)

    def _turn(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        momentum, gradients = group["momentum"], [p.grad for p in parameters if p.grad is not None]
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        means = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        torch._foreach_lerp_(means, gradients, 1 - momentum)
        updates = list(torch._foreach_lerp(gradients, means, momentum))
        dtype = TYPES[group["dtype"]] if group["dtype"] else None
        self.change(updates, partial(orthogonalize, steps=group["steps"], dtype=dtype))
        longer = [max(len(p), p.numel() // max(1, len(p))) for p in parameters]  # sides of the matrices
        torch._foreach_mul_(updates, [LIKE_ADAMW * math.sqrt(side) for side in longer])
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(parameters, updates, alpha=-group["lr"])

    def _adapt(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                # As torch's AdamW has it: on the host, whatever the parameter's type.
                step = torch.zeros((), dtype=torch.float32, device="cpu")
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                self.state[parameter].update(step=step, **moments)
        states = [self.state[parameter] for parameter in parameters]
        means, squares, steps = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
        gradients = [p.grad for p in parameters if p.grad is not None]
        options = {name: group[name] for name in ("lr", "weight_decay", "eps", "foreach")}
        options |= {"amsgrad": False, "maximize": False, "has_complex": any(p.is_complex() for p in parameters)}
        options["beta1"], options["beta2"] = group["betas"]
        adamw(parameters, gradients, means, squares, [], steps, **options)
