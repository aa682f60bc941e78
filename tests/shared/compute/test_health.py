"""Health of workers by their largest numbers, and norms in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_decentral.shared.compute.health import (
    FACTOR,
    PIECE,
    extremes,
    scale,
    scales_in,
    sound,
    squared_norm,
    stated,
)

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("scales", "expected"),
    [
        ([1.0, 1e30], [1, 0]),
        ([1e30, 1.0], [0, 1]),
        ([1.0, NAN, 2.0], [1, 0, 1]),
        ([INF, 1e30, 1.0, 2.0], [0, 0, 1, 1]),
        ([NAN, NAN], [0, 0]),
        ([NAN, 1e30], [0, 1]),  # nobody to compare with
        ([0.0, 0.0, 0.0], [1, 1, 1]),
        ([0.0, 1e-3], [1, 1]),  # the first to leave zero
        ([1.0, 1e8, 1e4], [1, 1, 1]),  # variances of other data
        ([3e38, 3e38, 3e38], [1, 1, 1]),  # a mask
        ([7.0], [1]),
    ],
    ids=str,
)
def test_who_is_sound(scales: list[float], expected: list[int]) -> None:
    assert sound(torch.tensor(scales, dtype=torch.float64)).int().tolist() == expected


def test_two_are_judged_as_any_number_is() -> None:
    """LAW: s_i is finite and s_i <= FACTOR max(1, the smallest that is finite)."""
    some = [0.0, 1e-3, 1.0, 5.0, FACTOR, 2 * FACTOR, 6 * FACTOR, 1e30, 1e300, INF, NAN]
    for a in some:
        for b in some:
            least = min((s for s in (a, b) if s < INF), default=INF)
            expected = [s < INF and s <= FACTOR * max(1.0, least) for s in (a, b)]
            assert sound(torch.tensor([a, b], dtype=torch.float64)).tolist() == expected, (a, b)


def test_what_was_stated_is_read_again() -> None:
    rows = torch.stack([stated([3, 2**40], [torch.tensor([1.0, -4.5])], torch.device("cpu")) for _ in range(2)])
    assert rows[:, :2].tolist() == [[3, 2**40]] * 2
    scales_in(rows)[1] = NAN
    assert scales_in(rows)[0] == 4.5
    assert sound(scales_in(rows)).tolist() == [True, False]


def test_columns_are_judged_by_themselves() -> None:
    rows = torch.tensor([[1.0, 1e20], [2 * FACTOR, 1e20], [1.0, 1e20]], dtype=torch.float64)
    assert sound(rows).tolist() == [[True, True], [False, True], [True, True]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_scale_is_the_largest_magnitude_and_hides_nothing(dtype: torch.dtype, bad: float) -> None:
    tensors = [torch.arange(-4, 3).to(dtype), torch.ones(2, 2, dtype=dtype), torch.empty(0, dtype=dtype)]
    assert float(scale(tensors)) == 4.0
    tensors[1][1, 0] = bad
    assert not bool(torch.isfinite(scale(tensors)))


def test_numbers_of_one_byte_have_extremes_too() -> None:
    assert extremes(torch.tensor([-2.0, 1.0]).to(torch.float8_e4m3fn)).tolist() == [-2.0, 1.0]


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
