"""A round of gossip goes over the parameters no more often than it did, and launches no more kernels."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from gpu.passes import Counting, averaging, cost
from lightning_decentral.gossip import Codec, Int8, Plain
from lightning_decentral.gossip.compute.mixing import correct_and_state_
from lightning_decentral.gossip.wire import peer
from lightning_decentral.shared.wire.gradients import GradientBucket, pack
from tests import simulated
from tests.simulated import CUDA


@pytest.mark.parametrize(
    ("codec", "neighbours", "passes", "in_the_way", "kernels"),
    [(Plain(), 1, 5, 5, 3), (Plain(), 2, 6, 6, 3), (Int8(), 1, 10.5, 5, 14)],
    ids=str,
)
def test_a_round_costs_no_more(codec: Codec, neighbours: int, passes: float, in_the_way: float, kernels: int) -> None:
    """Correction 3, one for each neighbour, and one for the copy of what leaves next. Eight bits: encoding 2.25 and
    decoding 1.25, a look at each 1, on a stream of their own.

    That a kernel of ours goes over its tensors once is seen in its assembly (`test_triton_kernels`)."""
    found = cost(codec, neighbours)
    assert passes - 0.1 < found.passes <= passes + 0.1
    assert in_the_way - 0.1 < found.in_the_way <= in_the_way + 0.1
    assert found.kernels == kernels


def test_a_mean_of_gradients_costs_no_more() -> None:
    """Packing 2 and dividing 2; what comes back is the gradients' own memory."""
    found = averaging()
    assert found.by_operation == {"cat": 2, "div_": 2}
    assert found.kernels == 2


def test_a_gradient_that_is_copied_back_is_counted() -> None:
    with mock.patch.object(
        GradientBucket, "pack_as_views", lambda self, flat: pack(self.gradients, self.parameters, flat)
    ):
        assert averaging().passes == pytest.approx(6, abs=0.1)


def test_what_goes_over_the_parameters_once_more_is_counted() -> None:
    before = cost(Plain())

    def copying(out: Tensor, header: Tensor, x: Tensor, sent: Tensor, *rest: Any) -> None:
        correct_and_state_(out, header, x, sent.clone(), *rest)

    with mock.patch.object(peer, "correct_and_state_", copying):
        after = cost(Plain())
    assert after.passes - before.passes == pytest.approx(2)
    assert after.kernels - before.kernels == 1


def test_operations_are_counted_as_a_device_does_them() -> None:
    with simulated.device(0):
        x, y, healthy = torch.ones(100).to(CUDA), torch.ones(100).to(CUDA), torch.ones((), device=CUDA) > 0
        with Counting() as counting:
            y.copy_(x)
            x.add_(y)
            torch.where(healthy, x, y, out=x)
            x[:50].view(5, 10).zero_()
            x.amax()
    whole = 400
    assert dict(counting.kernels) == {"copy_": 1, "add_": 1, "where": 1, "zero_": 1, "amax": 1}
    expected = {"copy_": 2 * whole, "add_": 3 * whole, "where": 3 * whole + 1, "zero_": whole // 2, "amax": whole + 4}
    assert dict(counting.moved) == expected
