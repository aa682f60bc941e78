"""Newton-Schulz against torch's own, the singular value decomposition, and itself one matrix at a time."""

import pytest
import torch
from torch import Tensor

from lightning_decentral.optim import Muon, newton_schulz
from lightning_decentral.optim.newton_schulz import orthogonalize

SHAPES = [(5, 5), (3, 8), (8, 3), (3, 8), (16, 3, 3, 3), (8, 3), (27, 16)]


def drawn(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def found(tensors: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    copies = [tensor.clone(memory_format=torch.preserve_format) for tensor in tensors]
    orthogonalize(copies, dtype=dtype)
    return copies


def test_singular_vectors_stay_and_singular_values_come_near_one() -> None:
    """The polynomial acts on each singular value by itself: a scalar iteration gives the expected matrix."""
    for tensor, result in zip(drawn(torch.float64), found(drawn(torch.float64)), strict=True):
        u, values, vh = torch.linalg.svd(tensor.flatten(1), full_matrices=False)
        values = values / values.square().sum().sqrt()
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        torch.testing.assert_close(result.flatten(1), u @ torch.diag(values) @ vh)
        assert ((values > 0.67) & (values < 1.14)).all()


def test_range_of_five_steps() -> None:
    values = torch.logspace(-2, 0, 10_001, dtype=torch.float64)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    assert (round(values.min().item(), 2), round(values.max().item(), 2)) == (0.68, 1.13)


def test_in_bfloat16_it_is_torchs() -> None:
    torchs = pytest.importorskip("torch.optim._muon")
    for tensor, result in zip(drawn(), found(drawn(), torch.bfloat16), strict=True):
        expected = torchs._zeropower_via_newtonschulz(tensor.flatten(1), (3.4445, -4.7750, 2.0315), 5, 1e-7)
        torch.testing.assert_close(result.flatten(1), expected.float(), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_together_is_one_by_one_bit_for_bit(dtype: torch.dtype) -> None:
    """What is streamed, or stands on several stages, comes out as it does in one place."""
    alone = [found([tensor])[0] for tensor in drawn(dtype)]
    assert all(map(torch.equal, found(drawn(dtype)), alone))


def test_batches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    plain = newton_schulz.newton_schulz
    monkeypatch.setattr(newton_schulz, "newton_schulz", lambda x, steps: counts.append(len(x)) or plain(x, steps))
    whole = found(drawn())
    assert counts == [1, 4, 2], "5 x 5; 3 x 8 lying and standing; 16 x 27 as filters and as a matrix"
    counts.clear()
    monkeypatch.setattr(newton_schulz, "CACHE_BYTES", 3 * 3 * 8 * 4)
    assert all(map(torch.equal, found(drawn()), whole))
    assert counts == [1, 3, 1, 1, 1]


def test_filters_keep_their_memory_format() -> None:
    plain = torch.randn(6, 4, 3, 3, generator=torch.Generator().manual_seed(1))
    last = plain.to(memory_format=torch.channels_last)
    results = found([plain])[0], found([last])[0]
    assert torch.equal(*results)
    assert results[1].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (3, 0, 2)], ids=str)
def test_matrices_without_elements_are_passed_over(shape: tuple[int, ...]) -> None:
    alone, beside = found([torch.ones(3, 4)]), found([torch.zeros(shape), torch.ones(3, 4)])
    assert beside[0].shape == shape
    assert torch.equal(beside[1], alone[0])
    parameter = torch.nn.Parameter(torch.zeros(shape))
    parameter.grad = torch.zeros(shape)
    Muon([parameter]).step()


def test_zero_stays_zero() -> None:
    assert torch.equal(found([torch.zeros(3, 4)])[0], torch.zeros(3, 4))
