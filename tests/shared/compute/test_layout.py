"""Layouts of models: what is compared, what is refused, what is put back."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_decentral.shared.compute.layout import (
    ModelLayout,
    Place,
    dense_strides,
    described,
    lay_states,
    memory_order,
    put,
    refuse_reordered,
    refuse_shared,
)
from lightning_decentral.shared.wire.mean import Swap

LAST = torch.channels_last


class Holder(nn.Module):
    """Tensors by name."""

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)


SHAPES = [(), (7,), (3, 4), (4, 2, 3, 1), (4, 1, 3, 3), (2, 3, 4, 5), (1, 1), (0, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_strides_are_those_of_torchs_own_copy(shape: tuple[int, ...]) -> None:
    whole = torch.zeros(shape)
    formats = [whole.to(memory_format=LAST)] if len(shape) == 4 else []
    for tensor in (whole, whole.mT if len(shape) > 1 else whole, whole[..., ::2] if shape else whole, *formats):
        copy = torch.empty_like(tensor, device="meta")
        assert memory_order(tensor.shape, dense_strides(tensor)) == memory_order(copy.shape, copy.stride())


def test_a_dimension_of_one_has_no_order() -> None:
    """Both are the same memory: nobody is refused for it."""
    row, last = torch.zeros(4, 1, 3, 3), torch.zeros(4, 1, 3, 3).to(memory_format=LAST)
    assert row.stride() != last.stride()
    assert described(Holder(x=nn.Parameter(row))) == described(Holder(x=nn.Parameter(last)))


def test_strides_are_named_unless_they_are_row_major() -> None:
    conv = nn.Conv2d(3, 5, 3)
    assert described(conv)["weight"] == "(5, 3, 3, 3) torch.float32"
    conv.to(memory_format=LAST).weight.requires_grad_(False)
    assert described(conv)["weight"] == "(5, 3, 3, 3) torch.float32 strides (27, 1, 9, 3) (frozen)"


def test_a_parameter_that_repeats_its_memory_is_refused_by_name() -> None:
    module = nn.Sequential(Holder(scale=nn.Parameter(torch.zeros(3, 1).expand(3, 4))))
    with pytest.raises(ValueError, match=r"0.scale of shape \(3, 4\) repeats its memory \(strides \(1, 0\)\)"):
        described(module)
    assert described(Holder(mask=torch.zeros(3, 1).expand(3, 4)))["mask"] == "(3, 4) torch.float32"


def test_of_a_repeated_buffer_its_own_memory_is_written() -> None:
    mask = torch.zeros(3, 1).expand(3, 4)
    put(mask, torch.arange(3.0).view(3, 1).expand(3, 4))
    assert torch.equal(mask, torch.arange(3.0).view(3, 1).expand(3, 4))
    put(whole := torch.zeros(2, 3), torch.ones(2, 3))
    assert bool((whole == 1).all())


def test_the_mean_stands_in_the_place_of_a_repeated_buffer() -> None:
    mask = torch.zeros(3, 1).expand(3, 4)
    swap = Swap([mask], [torch.ones(3, 4)])
    assert bool((mask == 1).all())
    swap.undo()
    assert not mask.any()


def test_parameters_in_one_memory_are_refused_and_neighbours_are_not() -> None:
    whole = torch.zeros(4, 6)
    refuse_shared(Holder(left=nn.Parameter(whole[:, :3]), right=nn.Parameter(whole[:, 3:])))
    tied = nn.Parameter(whole)
    refuse_shared(Holder(embedding=tied, head=tied))
    refuse_shared(Holder(a=nn.Parameter(whole, requires_grad=False), b=whole.view(24)))
    for other in (nn.Parameter(whole.t()), whole[1:, 2], nn.Parameter(whole[3], requires_grad=False)):
        with pytest.raises(ValueError, match=r"head share memory|head and other share memory without being one"):
            refuse_shared(Holder(head=nn.Parameter(whole), other=other))


def test_what_changed_is_put_back_and_what_came_later_is_row_major() -> None:
    known, late = nn.Conv2d(3, 5, 3), nn.Conv2d(3, 5, 3).to(memory_format=LAST)
    layout = ModelLayout(known.parameters())
    values = [p.detach().clone() for p in (*known.parameters(), *late.parameters())]
    known.to(memory_format=LAST)
    with pytest.warns(UserWarning, match=r"of shape \(5, 3, 3, 3\), torch.float32 got strides \(27, 1, 9, 3\)"):
        layout.restore([*known.parameters(), *late.parameters()])
    assert known.weight.is_contiguous()
    assert late.weight.is_contiguous()
    assert all(map(torch.equal, values, (*known.parameters(), *late.parameters())))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layout.restore()


def test_frozen_parameters_may_become_others() -> None:
    encoder = nn.Conv2d(3, 5, 3).requires_grad_(False)
    layout = ModelLayout(encoder.parameters())
    encoder.half().to(memory_format=LAST)
    layout.restore()
    layout.restore(encoder.parameters())  # it is freed now
    assert encoder.weight.is_contiguous()
    assert encoder.weight.dtype == torch.float16


@pytest.mark.parametrize("make", [torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9)], ids=["adamw", "sgd"])
def test_states_lie_as_their_parameters(make: Any) -> None:
    """A fused optimizer goes on as one by itself, whatever format its states came in."""

    def run(fused: bool) -> Tensor:
        weight = nn.Parameter(torch.linspace(0, 1, 60).view(5, 3, 2, 2).to(memory_format=LAST))
        optimizer = make([weight], lr=0.1, fused=fused)
        for step in range(4):
            if step == 2:
                state = optimizer.state[weight]
                state.update({n: v.contiguous() for n, v in state.items() if v is not None})
                lay_states(optimizer)
            weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step)).to(weight)
            weight.grad = weight.grad.to(memory_format=LAST)
            optimizer.step()
        return weight.detach()

    torch.testing.assert_close(run(True), run(False))


def test_another_shape_or_type_is_refused() -> None:
    conv = nn.Conv2d(3, 5, 3)
    layout = ModelLayout(conv.parameters())
    conv.half()
    with pytest.raises(ValueError, match=r"torch.float32 became shape.*torch.float16 after set-up"):
        layout.restore()


def test_flat_states_of_another_order_are_refused() -> None:
    class Row:
        def __init__(self, tensor: Tensor) -> None:
            self.places = [Place.of(tensor)]

    row, last = Row(torch.zeros(5, 3, 2, 2)), Row(torch.zeros(5, 3, 2, 2).to(memory_format=LAST))
    saved = {"states": [{"anchor": torch.zeros(60)}], "flights": [], "exchange": {"codec": "Plain()"}}
    saved["orders"] = [[0, 1, 2, 3]]
    refuse_reordered(saved, [row])
    refuse_reordered({**saved, "states": [{}]}, [last])  # nothing lies anywhere
    with pytest.raises(ValueError, match="lie in another memory order"):
        refuse_reordered(saved, [last])
