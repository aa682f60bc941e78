"""Gradient noise scale: how many workers' batches a step can make use of, from gradients that training computes anyway.

    g = (1/n) sum_i g_i     s = 1/(n - 1) sum_i |g_i - g|^2     of n workers with equal parameters, before averaging
    noise = mean s / mean (|g|^2 - s / n)                       in batches of a worker; both means are unbiased
    steps to a loss on n workers ~ 1 + noise / n                plain gradient descent at the best rate

Source: McCandlish et al. 1812.06162, where noise is B_simple in examples, and their equation 2.7 for the steps.

The estimator is a module of its own, as it depends on neither workers nor strategies."""

from collections.abc import Sequence

import torch
from torch import nn


class NoiseScale:
    """Estimates the gradient noise scale by means over steps."""

    def __init__(self) -> None:
        self._spread, self._signal = 0.0, 0.0

    @torch.no_grad()
    def see(self, modules: Sequence[nn.Module]) -> None:
        """Add all workers' gradients, after backward. Parameters without a gradient on some worker are left out."""
        count = len(modules)
        for members in zip(*(module.parameters() for module in modules), strict=True):
            gradients = [p.grad.to_dense() for p in members if p.grad is not None]
            if len(gradients) == count:
                rows = torch.stack(gradients)
                mean = rows.mean(0)
                spread = float((rows - mean).square().sum(dtype=torch.float64)) / (count - 1)
                self._spread += spread
                self._signal += float(mean.square().sum(dtype=torch.float64)) - spread / count

    @property
    def scale(self) -> float | None:
        """Noise scale in batches of a worker; None without steps, or if gradients were only noise."""
        return self._spread / self._signal if self._signal > 0 else None


def steps_ratio(noise: float, workers: int, others: int) -> float:
    """Steps to a loss on `others` workers over those on `workers`."""
    return (1 + noise / others) / (1 + noise / workers)


def noise_text(noise: float, workers: int) -> str:
    """Describe how many steps twice the workers would need, as the gradients' noise predicts."""
    fewer = steps_ratio(noise, workers, 2 * workers)
    return f"the noise of ddp's gradients predicts: {2 * workers} workers need {fewer:.2f} of the steps of {workers}"
