"""Bytes of a device that isn't there, counted against what is known to live."""

import pytest
import torch
from torch import nn

from lightning_decentral.spilled.compute.transfer import DEVICE, HOST, Counting, Ledger

SIDE = 16
BYTES = 4 * SIDE * SIDE


def test_results_count_until_they_die_and_views_do_not() -> None:
    ledger = Ledger()
    x = torch.randn(SIDE, SIDE)
    with Counting(ledger, {}):
        y = x @ x
        view = y.t()[1:]
        assert ledger.present_bytes == BYTES
        y.add_(1)
        z = y + view.sum()
        del y, z
    assert ledger.present_bytes == BYTES, "the view holds it"
    del view
    assert ledger.present_bytes == 0
    assert ledger.peak_bytes == 2 * BYTES + 4
    ledger.forget_peak()
    assert ledger.peak_bytes == 0


def test_results_of_host_tensors_are_on_the_host() -> None:
    ledger = Ledger()
    host, device = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    ledger.add([host], HOST)
    ledger.add([device], DEVICE)
    with Counting(ledger, {}):
        sums = [host + host, host + device]
    assert [ledger.where(t) for t in sums] == [HOST, DEVICE]
    assert ledger.present_bytes == 2 * BYTES


def test_a_backward_is_counted() -> None:
    """Two layers without biases, y = relu(x w) v: activations saved, then gradients."""
    ledger = Ledger()
    w, v, x = (torch.randn(SIDE, SIDE, requires_grad=i < 2) for i in range(3))
    with Counting(ledger, {}):
        loss = (nn.functional.relu(x @ w) @ v).sum()
        assert ledger.present_bytes == BYTES + 4, "the result of relu"
        loss.backward()
    assert ledger.present_bytes == 2 * BYTES + 4, "gradients"


def test_computing_with_what_is_absent_is_an_error() -> None:
    hollow = torch.full((), torch.nan)
    absent = {hollow.untyped_storage()._cdata: "layer.weight"}
    with Counting(Ledger(), absent):
        assert hollow.expand(3, 3).detach().t().shape == (3, 3), "looking is none"
        with pytest.raises(ValueError, match=r"layer.weight is used outside.*resident=\['layer.weight'\]"):
            hollow.expand(3, 3).sum()
