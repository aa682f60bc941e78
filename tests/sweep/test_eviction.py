"""A training whose storages travel between its steps equals one whose never do."""

import pytest
import torch
from torch import nn

from lightning_decentral.shared.compute import cuda
from lightning_decentral.sweep.eviction import Residence


def network(dropout: float = 0.5) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(dropout), nn.Linear(6, 6), nn.Linear(6, 4))
    net[4].weight = nn.Parameter(net[0].weight.T)  # a view of another parameter's storage
    return net


def trained(travels: bool, device: torch.device) -> tuple[dict[str, torch.Tensor], list[int]]:
    net = network(dropout=0.5 if device.type == "cpu" else 0.0).to(device)  # a device's draws are those of its schedule
    optimizer = torch.optim.Adam(net.parameters())
    sizes = []
    torch.manual_seed(1)
    for _ in range(4):
        net(torch.randn(3, 4).to(device)).square().sum().backward()
        if travels:
            residence = Residence(net, [optimizer], device)
            before, held = residence.kept_bytes, allocated(device)
            residence.leave()
            assert held - allocated(device) >= (before if device.type == "cuda" else 0)
            sizes += [before, residence.kept_bytes]
            residence.leave()  # who is away stays so
            residence.enter()
            assert residence.kept_bytes == before
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return net.state_dict(), sizes


def allocated(device: torch.device) -> int:
    return cuda.present_bytes(device) if device.type == "cuda" else 0


@pytest.mark.parametrize("device", ["cpu", "simulated", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
def test_leaving_and_entering_changes_nothing(device: str) -> None:
    """And while a training is away, its device's memory is free."""
    place = torch.device("cuda", 0) if device == "cuda" else torch.device(device)
    (plain, _), (moved, sizes) = trained(False, place), trained(True, place)
    assert all(torch.equal(plain[name], moved[name]) for name in plain)
    assert set(sizes[1::2]) == {0}


def test_shared_storages_count_once_and_optimizer_state_counts() -> None:
    net = network()
    optimizer = torch.optim.Adam(net.parameters())
    residence = Residence(net, [optimizer], torch.device("cpu"))
    own = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in [*net.parameters(), *net.buffers()]}
    assert residence.kept_bytes == sum(own.values())
    net(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    gradients = sum(4 * p.numel() for p in net.parameters())
    steps = 4 * len(list(net.parameters()))
    assert residence.kept_bytes == sum(own.values()) + 3 * gradients + steps


def test_what_lies_elsewhere_stays() -> None:
    net = nn.Linear(2, 2, device="meta")
    residence = Residence(net, [], torch.device("cpu"))
    assert residence.kept_bytes == 0
