"""A refused message becomes the receiver's own, on the host and on a device, whatever it held."""

import pytest
import torch
from torch import Tensor

from lightning_decentral.gossip.compute.integrity import refuse
from tests import simulated
from tests.simulated import CUDA

NAN, INF = float("nan"), float("inf")
TYPES = torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64


def refused(healthy: bool, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """(what was heard, the receiver's own) afterwards."""
    heard = torch.tensor([1.0, NAN, -INF, 1e30, 0.5] * 7).to(dtype).to(device)
    own = torch.linspace(-2, 2, 35).to(dtype).to(device)
    refuse([heard], [own], torch.tensor(healthy).to(device))
    return heard.cpu(), own.cpu()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("healthy", [True, False])
def test_what_is_refused_is_overwritten_and_nothing_else(dtype: torch.dtype, healthy: bool) -> None:
    before = torch.linspace(-2, 2, 35).to(dtype)
    for seed in range(3):
        here = refused(healthy, dtype, torch.device("cpu"))
        with simulated.device(seed):
            there = refused(healthy, dtype, CUDA)
        for heard, own in (here, there):
            assert torch.equal(own, before)
            assert torch.equal(heard, before) == (not healthy)
        torch.testing.assert_close(there[0], here[0], rtol=0, atol=0, equal_nan=True)
