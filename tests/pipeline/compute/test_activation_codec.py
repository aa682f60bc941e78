"""What a boundary leaves of a tensor, against its stated error."""

import inspect

import pytest
import torch

from lightning_decentral.pipeline import Bfloat16Activations, Boundary, ExactActivations, Int8Activations
from lightning_decentral.pipeline.compute import activation_codec as module

BOUNDARIES = [
    c() for _, c in inspect.getmembers(module, inspect.isclass) if issubclass(c, Boundary) and c is not Boundary
]
BOUND = {
    ExactActivations: lambda x: torch.zeros_like(x),
    Bfloat16Activations: lambda x: x.abs() * 2**-8,
    Int8Activations: lambda x: x.abs().amax(-1, keepdim=True).expand_as(x) / 253,
}


@pytest.mark.parametrize("boundary", BOUNDARIES, ids=lambda c: type(c).__name__)
def test_a_round_trip_stays_within_the_error(boundary):
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [1e-6, 1.0, 1e6, 0.0, 3.0]
    ).view(5, 1)
    buffer = boundary.buffer(x.shape, x.dtype, x.device)
    message = boundary.encode(x)
    assert (message.shape, message.dtype) == (buffer.shape, buffer.dtype)
    found = boundary.decode(buffer.copy_(message), x.shape, x.dtype)
    assert (found.shape, found.dtype) == (x.shape, x.dtype)
    assert ((found - x).abs() <= BOUND[type(boundary)](x)).all()


def test_bytes_of_a_message():
    x = torch.randn(2, 5, 8)
    sizes = [
        boundary.encode(x).numel() * boundary.encode(x).element_size()
        for boundary in (ExactActivations(), Bfloat16Activations(), Int8Activations())
    ]
    assert sizes == [320, 160, 120]
