"""Health: NaN, infinity and absurd numbers are found beside honest workers, and no honest worker is."""

import pytest
import torch

from lightning_decentral.shared.compute.health import FACTOR, extremes, scale, scales_in, sound, stated

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
