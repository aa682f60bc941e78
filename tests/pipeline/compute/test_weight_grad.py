"""A backward in two halves against the whole one."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from lightning_decentral.pipeline.compute.weight_grad import SplitWeights
from tests.pipeline.causal import waiting


def network(dtype=torch.float32):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.LayerNorm(8), Conv1D(8, 8), nn.GELU(), nn.Linear(8, 8, bias=False), nn.Linear(8, 3)]
    layers[-1].weight.requires_grad_(False)
    return nn.Sequential(*layers).to(dtype)


def gradients(weights, half_precision):
    """(of the input, of the parameters after the first half, after the second)."""
    model, rows = network(), torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
    for chunk in ((0, 0), (0, 1)):
        split = nullcontext() if weights is None else weights.during(chunk)
        with split, torch.autocast("cpu", torch.bfloat16, enabled=half_precision):
            output = model(rows)
        output.backward(torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape))
    first = {n for n, p in model.named_parameters() if p.grad is not None}
    late = set() if weights is None else waiting(weights)
    for chunk in late:
        weights.finish(chunk)
    return rows.grad, first, late, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("half_precision", [False, True])
def test_two_halves_are_the_whole(half_precision):
    towards, all_names, none, wanted = gradients(None, half_precision)
    found_towards, first, late, found = gradients(SplitWeights(), half_precision)
    assert (none, late) == (set(), {(0, 0), (0, 1)})
    assert all_names == set(wanted) == set(found)
    assert first == {"1.weight", "1.bias", "5.bias"}  # of the norm; a map whose weight is frozen isn't cut
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if half_precision else {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(found_towards, towards, **tolerance)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, **tolerance)
        assert found[name].dtype == gradient.dtype


def test_what_waits_is_freed_at_the_second_half():
    weights, model = SplitWeights(), network()
    rows = torch.randn(2, 6, requires_grad=True)
    with weights.during((0, 0)):
        model(rows).sum().backward()
    weights.finish((0, 0))
    assert waiting(weights) == set()
    with pytest.raises(KeyError):
        weights.finish((0, 0))


class Bare(nn.Module):
    """Parameters without a layer around them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.w, self.q, self.v, self.one = (nn.Parameter(torch.randn(*n)) for n in ((4, 4), (2,), (2,), (1,)))


LINEAR_MAPS = {
    "a bias made of two": lambda m, x: functional.linear(x, m.w, torch.cat((m.q, m.v))),
    "a residual in the bias's place": lambda m, x: torch.addmm(x.sin(), x, m.w),
    "a bias by broadcasting": lambda m, x: functional.linear(x, m.w, m.one),
    "scaled": lambda m, x: torch.addmm(m.one, x, m.w, beta=0.5, alpha=2.0),
    "a single row": lambda m, x: functional.linear(x[0], m.w),
    "more axes": lambda m, x: functional.linear(x.view(3, 1, 4), m.w),
}


@pytest.mark.parametrize("name", LINEAR_MAPS)
def test_every_gradient_arrives_whatever_is_mapped(name):
    def gradients(weights):
        model, x = Bare(), torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
        with nullcontext() if weights is None else weights.during((0, 0)):
            LINEAR_MAPS[name](model, x).cos().sum().backward()
        if weights is not None:
            weights.finish((0, 0))
        return {"x": x.grad, **{n: p.grad for n, p in model.named_parameters()}}

    wanted, found = gradients(None), gradients(SplitWeights())
    assert {n for n in wanted if wanted[n] is not None} == {n for n in found if found[n] is not None}
    for n, gradient in wanted.items():
        torch.testing.assert_close(found[n], gradient)
