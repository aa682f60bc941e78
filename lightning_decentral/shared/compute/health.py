"""Health of workers by the largest number that each holds: NaN, infinity, and what is absurd beside the others.

Short, and by itself: messages, the mean model and gradients are judged by one formula.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

FACTOR = 1e9
"""A variance may honestly be the square of 30000 times another worker's deviation; parameters never come near."""


def sound(scales: Tensor) -> Tensor:
    """s_i is finite and s_i <= FACTOR * max(1, m);  m = lower median of the finite s_j, column by column.

    The lower median is the smaller one of two, so that of two workers the absurd one is found; of more, where fewer
    than half are absurd alike. The 1 keeps a worker that has left zero from standing out. Nothing waits for a device.

    Args:
        scales: [workers, ...], each the largest magnitude of what a worker holds, as `scale` gives it.
    """
    finite = scales < torch.inf  # so is no NaN; magnitudes are not below 0
    ordered = scales.nan_to_num(nan=torch.inf, posinf=torch.inf).sort(0).values
    middle = (finite.sum(0, keepdim=True) - 1).clamp(min=0) // 2
    return finite & (scales <= FACTOR * ordered.gather(0, middle)[0].clamp(min=1))


def scale(tensors: Sequence[Tensor]) -> Tensor:
    """max |x| over all elements, a float64 scalar on their device; NaN or infinity where one is."""
    ends = torch.stack([end for t in tensors for end in _ends(t)])
    largest: Tensor = torch.linalg.vector_norm(ends, torch.inf, dtype=torch.float64)
    return largest


def extremes(tensor: Tensor) -> Tensor:
    """(smallest, largest) element, float64 [2]; NaN where one is, zeros where there is none."""
    return torch.stack(_ends(tensor)).double()


def _ends(tensor: Tensor) -> tuple[Tensor, Tensor]:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if not real.numel():
        zero = torch.zeros((), dtype=real.dtype, device=real.device)
        return zero, zero
    # The extremes carry NaN and infinity: one pass and no copy. Torch compares no numbers of one byte.
    smallest, largest = torch.aminmax(real.float() if real.element_size() == 1 else real)
    return smallest, largest
