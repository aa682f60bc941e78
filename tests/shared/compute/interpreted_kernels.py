"""Kernels give the bits of torch's operations, by Triton's interpreter.

Run by `test_triton_kernels` in a process of its own, whose Triton interprets from the start.
"""

import warnings
from math import ceil
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_decentral.gossip.compute import mixing
from lightning_decentral.shared.compute import health
from lightning_decentral.shared.compute import triton_kernels as kernels
from lightning_decentral.shared.compute.codec import quantize

EXACT = (torch.float32, torch.float16)
"""Triton's interpreter cuts bfloat16 off where a device rounds it."""


def numbers(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("rate", [1.0, 0.3])
@pytest.mark.parametrize("others", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", EXACT, ids=str)
def test_corrections(dtype: torch.dtype, others: int, rate: float) -> None:
    """The second of those heard isn't sound, and holds NaN."""
    x, sent, *heard = (numbers(3000, dtype, seed) for seed in range(2 + others))
    sane = torch.tensor([True, *(place != 1 for place in range(others))])
    heard[1:2] = [tensor.fill_(torch.nan) for tensor in heard[1:2]]
    weights = [1 / (others + 1)] * others
    expected, found, added = x.clone(), x.clone(), torch.empty(3000)
    mixing._correct(expected, sent, heard, weights, sane, rate)
    assert kernels.correct_(found, sent, heard, weights, sane, rate)
    assert kernels.difference_(added, sent, heard, weights, sane)
    assert torch.equal(found, expected)
    assert not torch.equal(found, x)
    assert torch.equal(added, mixing.difference(sent, heard, weights, sane))
    mixing.apply_difference(x, added, rate)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize(
    ("count", "others", "planted"),
    [(1, 1, None), (3000, 2, None), (3000, 1, float("nan")), (3000, 3, -float("inf")), (2 * 1024 + 7, 1, None)],
)
def test_corrections_with_a_copy_of_what_leaves_next(
    dtype: torch.dtype, count: int, others: int, planted: float | None
) -> None:
    """As one after the other, header included: of NaN it says infinity, as a copy's kernel does."""
    x, sent, *heard = (numbers(count, dtype, seed) for seed in range(2 + others))
    if planted is not None:
        x[count // 2] = planted
    sane, weights, rate = torch.ones(1 + others, dtype=torch.bool), [1 / (others + 1)] * others, 0.3
    torchs, expected, found = ([torch.empty_like(x), torch.empty(3, dtype=torch.int64), x.clone()] for _ in range(3))
    given = sent, heard, weights, sane, rate
    with mock.patch.object(kernels, "PARTS", 2):  # so that a program goes over several blocks
        assert kernels.correct_(expected[2], *given)
        assert kernels.state_(expected[0], expected[1], expected[2], 7, count)
        assert kernels.correct_and_state_(*found, *given, 7, count)
    mixing._correct_and_state(*torchs, *given, 7, count)
    for one, two, three in zip(found, expected, torchs, strict=True):
        assert torch.equal(one.nan_to_num(9.0), two.nan_to_num(9.0))
        assert planted is not None or torch.equal(one, three)
    assert not torch.equal(found[2], x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_equal_messages_change_no_bit(dtype: torch.dtype) -> None:
    """Of the parameters, which have moved since; products with thirds and fifths would each be rounded."""
    x, sent, sane = numbers(999, dtype, 0), numbers(999, dtype, 1), torch.ones(4, dtype=torch.bool)
    for weights in ([1 / 3, 1 / 3, 0.2], [0.2, 0.2, 0.2]):
        found = x.clone()
        if dtype != torch.float64:
            assert kernels.correct_(found, sent, [sent.clone()] * 3, weights, sane, 0.7)
        mixing.correct_(found, sent, [sent.clone()] * 3, weights, sane, 0.7)
        assert torch.equal(found, x)


@pytest.mark.parametrize(
    ("count", "planted", "programs"),
    [
        *((n, planted, kernels.PARTS) for n in (1, 5, 3000) for planted in (None, -7e4, float("inf"), float("nan"))),
        (1024, None, kernels.PARTS),
        (3000, None, 2),  # one of them copies two blocks
    ],
)
def test_statements(count: int, planted: float | None, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of NaN a kernel says infinity: neither is sound."""
    monkeypatch.setattr(kernels, "PARTS", programs)
    message = numbers(count, torch.float32, 3)
    if planted is not None:
        message[count // 2] = planted
    expected, found = ([torch.empty_like(message), torch.empty(3, dtype=torch.int64)] for _ in range(2))
    health._state(*expected, message, 1, 2**40)
    assert kernels.state_(*found, message, 1, 2**40)
    torch.testing.assert_close(found[0], message, rtol=0, atol=0, equal_nan=True)
    scales = [
        health.scales_in(header).nan_to_num(nan=torch.inf, posinf=torch.inf).item() for _, header in (expected, found)
    ]
    assert scales[0] == scales[1]
    assert found[1][:2].tolist() == [1, 2**40]


@pytest.mark.parametrize(
    "scales",
    [
        *([1.0, 2.0], [1e10, 1.0], [1e300, 1.0], [1e307, 1e300], [torch.inf, 1.0], [torch.nan, torch.inf], [0.0, 0.0]),
        *([5.0, 1e12, 3.0], [1e300] * 3, [torch.inf, 1.0, 2.0, torch.nan], [*range(31), 1e11], [7.0]),
    ],
    ids=str,
)
def test_judgements(scales: list[float]) -> None:
    headers = torch.zeros(len(scales), 3, dtype=torch.int64)
    health.scales_in(headers).copy_(torch.tensor(scales, dtype=torch.float64))
    found = torch.empty(len(scales), dtype=torch.bool)
    assert kernels.judge_(found, headers)
    assert found.tolist() == health.judged(headers).tolist()


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize(("count", "block"), [(70_000, 1000), (300, 7), (5000, 4096), (3, 256)])
def test_eight_bits(count: int, block: int, dtype: torch.dtype) -> None:
    message = numbers(count, dtype, 5)
    message[: min(block, count - 1)] = 0
    rows = ceil(count / block)
    for replace in (False, True):
        expected, found = ((torch.empty(count, dtype=torch.int8), torch.empty(rows), message.clone()) for _ in range(2))
        quantize._encode(*expected, block, 2**62 + 12345, replace)
        assert kernels.int8_encode_(*found, block, 2**62 + 12345, replace)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
    decoded, heard = torch.empty_like(message), torch.empty_like(message)
    quantize._decode(decoded, *expected[:2], block)
    assert kernels.int8_decode_(heard, *expected[:2], block)
    assert torch.equal(decoded, heard)


@pytest.mark.parametrize("planted", [float("inf"), float("nan")])
def test_hearers_see_what_is_not_finite(planted: float) -> None:
    message = numbers(1000, torch.float32, 6)
    message[300] = planted
    codes, scales, heard = torch.empty(1000, dtype=torch.int8), torch.empty(4), torch.empty(1000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, of NaN as an integer
        kernels.int8_encode_(codes, scales, message, 256, 1, False)
        kernels.int8_decode_(heard, codes, scales, 256)
    assert torch.isfinite(heard[:256]).all()
    assert not torch.isfinite(heard[256:512]).all()


def test_what_a_kernel_does_not_serve_is_left_to_torch() -> None:
    x, sane = torch.zeros(8, dtype=torch.float64), torch.ones(6, dtype=torch.bool)
    assert not kernels.correct_(x, x, [x], [0.5], sane, 1.0)
    assert not kernels.difference_(x, x, [x], [0.5], sane)
    assert not kernels.correct_(x.float(), x.float(), [x.float()] * 5, [0.1] * 5, sane, 1.0)
    assert not kernels.state_(x, torch.empty(3, dtype=torch.int64), x, 1, 8)
    assert not kernels.judge_(torch.empty(33, dtype=torch.bool), torch.zeros(33, 3, dtype=torch.int64))
    assert not kernels.int8_encode_(torch.empty(8, dtype=torch.int8), torch.empty(1), x.float(), 5000, 1, True)
    assert not kernels.int8_decode_(x.float(), torch.empty(8, dtype=torch.int8), torch.empty(1), 5000)
