"""Norms in float64, whatever the type of the tensors. Short, and by itself: gossip, pipelines and monitors use them."""

from collections.abc import Sequence

import torch
from torch import Tensor


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """sum_k ||t_k||^2 in float64, complex numbers as pairs; a scalar on the tensors' device.

    One pass over each on a device, where `t.double().square().sum()` would write two copies in float64.
    """
    real = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    return torch.stack([torch.linalg.vector_norm(t, dtype=torch.float64) for t in real]).square().sum()
