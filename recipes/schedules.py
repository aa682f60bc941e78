"""Learning-rate schedules: factor(step) on the optimizer's own learning rate, warmed up linearly.

Each takes the optimizer and the number of steps of the whole run; `warmup` is a fraction of that number. Where
`momentum_start` is given, the optimizer's momentum rises from there over all steps (`optim.MomentumWarmup`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, LRScheduler

from lightning_decentral.optim import MomentumWarmup

Momentum = float | None


def constant(
    optimizer: Optimizer, total_steps: int, *, warmup: float = 0.0, momentum_start: Momentum = None
) -> LRScheduler:
    """1"""
    return _warmed(optimizer, total_steps, warmup, momentum_start, lambda _: 1.0)


def linear(
    optimizer: Optimizer,
    total_steps: int,
    *,
    warmup: float = 0.05,
    floor: float = 0.0,
    momentum_start: Momentum = None,
) -> LRScheduler:
    """1 - (1 - floor) s, where s in [0, 1] is the part of the steps after the warm-up that is done."""
    return _warmed(optimizer, total_steps, warmup, momentum_start, lambda s: 1.0 - (1.0 - floor) * s)


def cosine(
    optimizer: Optimizer,
    total_steps: int,
    *,
    warmup: float = 0.05,
    floor: float = 0.0,
    momentum_start: Momentum = None,
) -> LRScheduler:
    """floor + (1 - floor) (1 + cos(pi s)) / 2 (Loshchilov and Hutter, 1608.03983, equation 5, one period)."""
    return _warmed(
        optimizer, total_steps, warmup, momentum_start, lambda s: floor + (1 - floor) * (1 + math.cos(math.pi * s)) / 2
    )


def inverse_sqrt(
    optimizer: Optimizer, total_steps: int, *, warmup: float = 0.05, momentum_start: Momentum = None
) -> LRScheduler:
    """sqrt(warm_steps / step), 1 at the end of the warm-up (Vaswani et al., 1706.03762, equation 3, scaled)."""
    warm_steps = max(1, round(warmup * total_steps))
    remaining = total_steps - warm_steps
    return _warmed(
        optimizer, total_steps, warmup, momentum_start, lambda s: math.sqrt(warm_steps / (warm_steps + s * remaining))
    )


def milestones(
    optimizer: Optimizer,
    total_steps: int,
    *,
    warmup: float = 0.0,
    at: Sequence[float] = (1 / 3, 2 / 3, 8 / 9),
    factor: float = 0.1,
    momentum_start: Momentum = None,
) -> LRScheduler:
    """factor^m, where m counts the milestones (fractions of the steps after the warm-up) that are passed."""
    return _warmed(
        optimizer, total_steps, warmup, momentum_start, lambda s: factor ** sum(s >= milestone for milestone in at)
    )


def _warmed(
    optimizer: Optimizer,
    total_steps: int,
    warmup: float,
    momentum_start: Momentum,
    decay: Callable[[float], float],
) -> LRScheduler:
    """(step + 1) / (warm_steps + 1) before warm_steps, then decay((step - warm_steps) / (total_steps - warm_steps))."""
    if not 0 <= warmup < 1:
        raise ValueError(f"warmup is a fraction of all steps, got {warmup}: give a number from 0 up to 1")
    warm_steps = round(warmup * total_steps)

    def factor(step: int) -> float:
        if step < warm_steps:
            return (step + 1) / (warm_steps + 1)
        return decay(min(1.0, (step - warm_steps) / max(1, total_steps - warm_steps)))

    rates = LambdaLR(optimizer, factor)
    if momentum_start is None:
        return rates
    return ChainedScheduler([rates, MomentumWarmup(optimizer, total_steps, momentum_start)])
