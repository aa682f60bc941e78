"""Messages that say the same are mixed to what they say, bit by bit; others to their weighted sum."""

import pytest
import torch

from lightning_decentral.gossip.compute.correction import mix

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
WEIGHTS = [[1 / 2, 1 / 2], [1 / 3] * 3, [1 / 5] * 5, [0.1, 0.2, 0.3, 0.4], [0.0, 0.25, 0.75], [2 / 3, 1 / 3]]


def messages(number: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(1000, generator=generator, dtype=torch.float64).to(dtype) for _ in range(number)]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_at_consensus_nobody_moves(dtype: torch.dtype, weights: list[float]) -> None:
    (own,) = messages(1, dtype)
    heard = [own.clone() for _ in weights[1:]]
    mix(own, heard, weights)
    assert torch.equal(heard[0], own)


@pytest.mark.parametrize("weights", [*WEIGHTS, [0.3, 0.3, 0.6], [0.0, 0.5], [0.0, 0.0, 1.0]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_the_weighted_sum(dtype: torch.dtype, weights: list[float]) -> None:
    own, *heard = messages(len(weights), dtype)
    exact = torch.complex128 if dtype.is_complex else torch.float64
    expected = sum(w * m.to(exact) for w, m in zip(weights, [own, *heard], strict=True))
    kept = [own.clone(), *(m.clone() for m in heard[1:])]
    mix(own, heard, weights)
    bound = 4 * torch.finfo(dtype).eps * sum(weights) * 4  # 4: the largest number that was drawn
    assert float((heard[0].to(exact) - expected).abs().max()) < bound
    assert all(map(torch.equal, [own, *heard[1:]], kept)), "only what was heard first is overwritten"
