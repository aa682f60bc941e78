"""A norm in float64 is right, and writes nothing of the tensor's size."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_decentral.shared.compute.norms import PIECE, squared_norm


class Largest(TorchDispatchMode):
    """How many elements the largest result of an operation has."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t._base is None]
        self.elements = max([self.elements, *(t.numel() for t in made)])
        return result


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_it_is_the_sum_of_squares(dtype: torch.dtype) -> None:
    tensors = [torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype) for n in (1, 7, 300)]
    expected = sum((torch.view_as_real(t) if t.is_complex() else t).double().square().sum() for t in tensors)
    found = squared_norm([*tensors, torch.empty(0, dtype=dtype)])
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, torch.as_tensor(expected), rtol=1e-13, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("step", [1, 2])
def test_what_is_larger_than_a_piece_has_the_same_norm(dtype: torch.dtype, step: int) -> None:
    tensor = torch.randn(3 * PIECE + 5, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()[::step]
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    found = squared_norm([tensor])
    torch.testing.assert_close(found, real.detach().double().square().sum(), rtol=1e-12, atol=0)
    assert not squared_norm([torch.ones(3 * PIECE, requires_grad=True)]).requires_grad


@pytest.mark.parametrize("worst", [float("nan"), float("inf")])
def test_what_is_not_finite_has_no_finite_norm(worst: float) -> None:
    tensor = torch.ones(2 * PIECE + 1)
    tensor[-1] = worst
    assert not torch.isfinite(squared_norm([tensor]))


def largest_allocation(norm: Callable[[], Tensor]) -> int:
    """Bytes, also of what an operation makes within itself."""
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        norm()
    return max(event.self_cpu_memory_usage for event in profile.events())


def test_a_host_writes_no_copy_in_float64() -> None:
    tensor = torch.ones(8 * PIECE)
    assert largest_allocation(lambda: torch.linalg.vector_norm(tensor, dtype=torch.float64)) >= 8 * tensor.numel()
    assert largest_allocation(lambda: squared_norm([tensor])) <= 8 * PIECE


def test_no_copy_of_the_tensor_is_written() -> None:
    with Largest() as largest:
        squared_norm([torch.ones(1000)[:999]])
    assert largest.elements == 1000, "the tensor itself, which was made within"
    tensor = torch.ones(1000)
    with Largest() as largest:
        squared_norm([tensor, tensor])
    assert largest.elements == 2
    with Largest() as largest:
        tensor.double().square().sum()
    assert largest.elements == 1000
