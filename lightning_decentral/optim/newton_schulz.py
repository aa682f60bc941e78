"""Newton-Schulz iteration: approximates the nearest matrix with orthonormal rows, by matrix products alone."""

from collections.abc import Sequence

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # steepest at zero; in five steps values from 0.01 up come to 0.68 ... 1.13
SMALLEST_NORM = 1e-7
CACHE_BYTES, DEVICE_BYTES = 2**20, 2**26
"""Bytes of the matrices stacked in one call, so that they stay in a CPU's cache and keep a GPU busy. A call needs five
such stacks at most; a larger matrix is a stack by itself."""


def newton_schulz(matrices: Tensor, steps: int) -> Tensor:
    """Move singular values towards 1, and keep singular vectors.

        X <- X / ||X||
        `steps` times:  A = X X^T;  X <- a X + (b A + c A^2) X        (a, b, c) = COEFFICIENTS

    `matrices` are [count, rows, columns], in the type to compute in; rows <= columns takes the fewest operations.

    Source: Jordan et al., Muon (kellerjordan.github.io/posts/muon, 2024); Bernstein and Newhouse 2409.20325."""
    a, b, c = COEFFICIENTS
    x: Tensor = matrices / torch.linalg.matrix_norm(matrices, keepdim=True).clamp(min=SMALLEST_NORM)
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x


def orthogonalize(tensors: Sequence[Tensor], steps: int = 5, dtype: torch.dtype | None = None) -> None:
    """Apply `newton_schulz` to each tensor in place; a filter [out, in, ...] is a matrix [out, rest]. Matrices of one
    shape or its transpose are stacked, as many as fill a call. `dtype` is the type to compute in; None: bfloat16 on
    GPUs, on the CPU float32, or the tensors' own type if that is more precise."""
    alike: dict[tuple[torch.device, torch.dtype, torch.Size], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():  # skip empty tensors
            alike.setdefault((tensor.device, tensor.dtype, _lying(tensor).shape), []).append(tensor)
    for (device, own, _), batch in alike.items():
        on_host = device.type == "cpu"
        working = dtype or (torch.promote_types(own, torch.float32) if on_host else torch.bfloat16)
        most = CACHE_BYTES if on_host else DEVICE_BYTES
        count = max(1, most // (batch[0].numel() * working.itemsize))
        for start in range(0, len(batch), count):
            _in_one_call(batch[start : start + count], steps, working)


def _in_one_call(alike: Sequence[Tensor], steps: int, working: torch.dtype) -> None:
    """Orthogonalize matrices of one shape; a function, so that its memory is freed before the next call."""
    stack = torch.stack([_lying(tensor) for tensor in alike]).to(working)
    for tensor, found in zip(alike, newton_schulz(stack, steps), strict=True):
        tensor.copy_((found if len(found) == len(tensor) else found.mT).reshape(tensor.shape))


def _lying(tensor: Tensor) -> Tensor:
    """View a tensor as a matrix [short side, long side]."""
    matrix = tensor.reshape(len(tensor), -1)
    return matrix if len(matrix) <= matrix.shape[1] else matrix.mT
