"""Norms in float64, whatever the type of the tensors. Short, and by itself: gossip, pipelines and monitors use them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_decentral.shared.compute.codec.quantize import scratch

PIECE = 2**16
"""Elements that a host makes float64 at once: they stay in its cache."""


@torch.no_grad()
def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """sum_k ||t_k||^2 in float64, complex numbers as pairs; a scalar on the tensors' device.

    One pass over each on a device, where `t.double().square().sum()` would write two copies in float64. On a host
    torch's own norm writes one such copy, which took six times as long: here it is one of a piece after the other.
    """
    real = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    return torch.stack([_on_host(t) if t.device.type == "cpu" else _of(t) for t in real]).square().sum()


def _of(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float64)
    return norm


def _on_host(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.float64 or tensor.numel() <= PIECE or not tensor.is_contiguous():
        return _of(tensor)
    # A thread gives memory back that it has freed: fresh pages for each piece took twice as long.
    pieces = tensor.view(-1).split(PIECE)
    return _of(torch.stack([_of(scratch(len(p), torch.float64, p.device).copy_(p)) for p in pieces]))
