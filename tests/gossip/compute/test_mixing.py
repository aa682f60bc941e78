"""Messages that are equal are mixed to their very bits, others to their weighted sum; a refused one becomes the
receiver's own, on the host and on a device, whatever it held."""

import pytest
import torch
from torch import Tensor

from lightning_decentral.gossip.compute.mixing import mix, refuse
from tests import simulated
from tests.simulated import CUDA

NAN, INF = float("nan"), float("inf")
TYPES = torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64


def refused(healthy: bool, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """(what was received, the receiver's own) afterwards."""
    received = torch.tensor([1.0, NAN, -INF, 1e30, 0.5] * 7).to(dtype).to(device)
    own = torch.linspace(-2, 2, 35).to(dtype).to(device)
    refuse(received, own, torch.tensor(healthy).to(device))
    return received.cpu(), own.cpu()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("healthy", [True, False])
def test_what_is_refused_is_overwritten_and_nothing_else(dtype: torch.dtype, healthy: bool) -> None:
    before = torch.linspace(-2, 2, 35).to(dtype)
    for seed in range(3):
        here = refused(healthy, dtype, torch.device("cpu"))
        with simulated.device(seed):
            there = refused(healthy, dtype, CUDA)
        for received, own in (here, there):
            assert torch.equal(own, before)
            assert torch.equal(received, before) == (not healthy)
        torch.testing.assert_close(there[0], here[0], rtol=0, atol=0, equal_nan=True)


WEIGHTS = [[1 / 2, 1 / 2], [1 / 3] * 3, [1 / 5] * 5, [0.1, 0.2, 0.3, 0.4], [0.0, 0.25, 0.75], [2 / 3, 1 / 3]]


def messages(number: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(1000, generator=generator, dtype=torch.float64).to(dtype) for _ in range(number)]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_at_consensus_nobody_moves(dtype: torch.dtype, weights: list[float]) -> None:
    (own,) = messages(1, dtype)
    received = [own.clone() for _ in weights[1:]]
    mix(own, received, weights)
    assert torch.equal(received[0], own)


@pytest.mark.parametrize("weights", [*WEIGHTS, [0.3, 0.3, 0.6], [0.0, 0.5], [0.0, 0.0, 1.0]], ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_it_is_the_weighted_sum(dtype: torch.dtype, weights: list[float]) -> None:
    own, *received = messages(len(weights), dtype)
    exact = torch.complex128 if dtype.is_complex else torch.float64
    expected = sum(w * m.to(exact) for w, m in zip(weights, [own, *received], strict=True))
    kept = [own.clone(), *(m.clone() for m in received[1:])]
    mix(own, received, weights)
    bound = 4 * torch.finfo(dtype).eps * sum(weights) * 4  # 4: the largest number that was drawn
    assert float((received[0].to(exact) - expected).abs().max()) < bound
    assert all(map(torch.equal, [own, *received[1:]], kept)), "only what was received first is overwritten"
