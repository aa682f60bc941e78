"""AccumAdam, AccumAdamW: Adam for gossip, where moments come from a worker's own gradients averaged over windows.

Adam divides by the root of the mean squared gradient. Under all-reduce that gradient is the mean of n workers; under
gossip it is a worker's own, up to sqrt(n) times as noisy, so the same learning rate takes smaller steps. Averaging a
worker's gradients over a window of s steps before they enter the moments restores the noise level of all-reduce without
a message: at s = n a window has as many examples as a step of all-reduce. s = 1 is torch's Adam and AdamW."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_decentral.optim.groups import Betas, check_options, evaluated, real, together
from lightning_decentral.shared.plan.arguments import checked


@checked
class AccumAdam(Optimizer):
    """Adam that updates its moments every s steps, from the window's mean gradient, and the parameters in every step.

        m^ = b1 m + (1 - b1) g                   k = ceil(t / s), t the step from 1
        v^ = b2 v + (1 - b2) g^2
        x <- x - lr (m^ / (1 - b1^k)) / (sqrt(v^ / (1 - b2^k)) + eps)
        a <- a + g / s
        every s steps:  m <- b1 m + (1 - b1) a;  v <- b2 v + (1 - b2) a^2;  a <- 0

    This is not gradient accumulation. `betas` are per window: an Adam that averages over equally many steps has betas
    whose powers of s these are (0.9 and 0.999 become 0.656 and 0.996 at s = 4).

    Args:
        lr: learning rate.
        betas: (b1, b2), in [0, 1).
        eps: number added to the root, in units of the gradient.
        weight_decay: weight_decay * x is added to the gradient (Adam), or x is multiplied by 1 - lr * weight_decay
            first (AdamW). None: 0 for Adam, 0.01 for AdamW, as in torch.
        window: s, in steps. The source uses about half the number of workers (4 at 8 workers, 8 at 16 and 32).
        foreach: update many parameters in one call; None: if the parameters are on a CUDA device.

    Memory: 3 copies of the parameters (m, v, a), 2 with a window of 1, and during a step 2 copies of one call's
    parameters.

    Raises:
        ValueError: an argument out of range.
        RuntimeError: a sparse gradient.

    Source: Wang et al. 2410.11998, algorithm AccumAdam; Kingma and Ba 1412.6980.
    """

    decoupled: ClassVar[bool] = False
    usual_decay: ClassVar[float] = 0.0

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
        *,
        window: int = 4,
        foreach: bool | None = None,
    ) -> None:
        decay = self.usual_decay if weight_decay is None else weight_decay
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": decay}
        super().__init__(params, {**defaults, "window": window, "foreach": foreach})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        options = {**self.defaults, **param_group}
        check_options(options)
        if options["window"] < 1 or options["window"] != int(options["window"]):
            raise ValueError(f"window must be a whole number from 1 up, got {options['window']}: 1 is Adam")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = evaluated(closure)
        for group in self.param_groups:
            for parameters in together(self, group, partial(_start, window=group["window"])):
                self._update(parameters, group)
        return loss

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        (beta1, beta2), window, decay = group["betas"], group["window"], group["weight_decay"]
        states = [self.state[p] for p in parameters]
        for state in states:
            state["step"] += 1
        step: int = states[0]["step"]
        x = real(parameters)
        gradients = real([p.grad for p in parameters if p.grad is not None])
        means = real([state["exp_avg"] for state in states])
        squares = [state["exp_avg_sq"] for state in states]
        if decay and self.decoupled:
            torch._foreach_mul_(x, 1 - group["lr"] * decay)
        elif decay:
            # Not in place: the gradients are the user's.
            gradients = list(torch._foreach_add(gradients, x, alpha=decay))
        # The moments as if this gradient had been added.
        mean, square = list(torch._foreach_lerp(means, gradients, 1 - beta1)), list(torch._foreach_mul(squares, beta2))
        torch._foreach_addcmul_(square, gradients, gradients, value=1 - beta2)
        windows = math.ceil(step / window)
        torch._foreach_sqrt_(square)
        torch._foreach_div_(square, math.sqrt(1 - beta2**windows))
        torch._foreach_add_(square, group["eps"])
        torch._foreach_addcdiv_(x, mean, square, value=-group["lr"] / (1 - beta1**windows))
        if window > 1:
            accumulated = real([state["window_sum"] for state in states])
            torch._foreach_add_(accumulated, gradients, alpha=1 / window)
            gradients = accumulated
        if step % window == 0:
            torch._foreach_lerp_(means, gradients, 1 - beta1)
            torch._foreach_mul_(squares, beta2)
            torch._foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
            if window > 1:
                torch._foreach_zero_(gradients)


class AccumAdamW(AccumAdam):
    """AccumAdam with decoupled weight decay: x <- (1 - lr weight_decay) x before the step.

    Source: Wang et al. 2410.11998; Loshchilov and Hutter 1711.05101. At a window of 1 it is `torch.optim.AdamW`."""

    decoupled = True
    usual_decay = 0.01


def _start(parameter: Tensor, window: int) -> dict[str, Any]:
    (square,) = real([parameter])  # each part of a complex number has its own second moment
    # The step is a Python number: Lightning moves every tensor of the state to the device, where reading a tensor
    # would make the host wait.
    state = {"step": 0, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(square)}
    return {**state, "window_sum": torch.zeros_like(parameter)} if window > 1 else state
