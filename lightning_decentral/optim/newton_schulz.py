"""Newton-Schulz: nearly the nearest matrix with orthonormal rows, by products alone; equal shapes in one call."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # steepest at zero; in five steps values from 0.01 up come to 0.68 ... 1.13
SMALLEST_NORM = 1e-7
BATCH_BYTES = 2**26
"""Of the matrices that are stacked in one call; while it computes there are four such stacks at most."""


def newton_schulz(matrices: Tensor, steps: int) -> Tensor:
    """Singular values towards 1, singular vectors kept.

        X <- X / ||X||
        `steps` times:  A = X X^T;  X <- a X + (b A + c A^2) X        (a, b, c) = COEFFICIENTS

    Args:
        matrices: [count, rows, columns], in the type to compute in; rows <= columns takes the fewest operations.

    Source: Jordan et al., Muon (kellerjordan.github.io/posts/muon, 2024); Bernstein and Newhouse 2409.20325.
    """
    a, b, c = COEFFICIENTS
    x = matrices / torch.linalg.matrix_norm(matrices, keepdim=True).clamp(min=SMALLEST_NORM)
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x


def orthogonalize(tensors: Sequence[Tensor], steps: int) -> None:
    """Each tensor becomes what `newton_schulz` makes of it, in place; filters [out, in, ...] as a matrix [out, rest].

    Computed in bfloat16 on devices, in float32 or better on the CPU. Matrices of one shape, lying or standing, go
    together, as many as are `BATCH_BYTES`.
    """
    for batch in _batches(tensors):
        stack = torch.stack([_lying(tensor) for tensor in batch])
        for tensor, found in zip(batch, newton_schulz(stack.to(working_type(stack)), steps), strict=True):
            tensor.copy_((found if _is_lying(tensor) else found.mT).reshape(tensor.shape))


def working_type(tensor: Tensor) -> torch.dtype:
    """The type to compute in."""
    return torch.promote_types(tensor.dtype, torch.float32) if tensor.device.type == "cpu" else torch.bfloat16


def _is_lying(tensor: Tensor) -> bool:
    return len(tensor) <= tensor[0].numel()


def _lying(tensor: Tensor) -> Tensor:
    """[short side, long side]"""
    matrix = tensor.reshape(len(tensor), -1)
    return matrix if _is_lying(tensor) else matrix.mT


def _batches(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    alike: dict[tuple[object, ...], list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.device, tensor.dtype, *_lying(tensor).shape), []).append(tensor)
    for batch in alike.values():
        count = max(1, BATCH_BYTES // (batch[0].numel() * working_type(batch[0]).itemsize))
        yield from (batch[i : i + count] for i in range(0, len(batch), count))
