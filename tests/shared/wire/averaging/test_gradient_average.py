"""Gradients of devices that share them are their mean, and arrive while the backward pass goes on."""

import itertools
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_decentral.shared.compute.codec import Int8
from lightning_decentral.shared.wire.averaging.gradient_average import GradientAverage
from lightning_decentral.shared.wire.compressed_mean import CompressedMean, ExactMean
from lightning_decentral.shared.wire.pending import Pending, Together
from lightning_decentral.shared.wire.transport import GlooTransport
from tests.gossip.wire.test_device import Mirror, every_device, without_waiting
from tests.shared.wire.test_compressed_mean import groups
from tests.world import world

pytestmark = pytest.mark.threads

SIZE = 3


class Model(nn.Module):
    """Tied weights, a frozen parameter, one that only device 1 uses, one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first, self.second, self.last, self.sometimes, self.never, self.frozen = (
            nn.Parameter(torch.randn(4, 4, generator=generator, dtype=torch.float64)) for _ in range(6)
        )
        self.single = nn.Parameter(torch.randn(4, generator=generator))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        x = (x @ self.first @ self.frozen).tanh() @ self.second @ self.first * self.single
        return (x @ (self.sometimes if rank == 1 else self.last)).square().sum()


def inputs(rank: int, step: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def expected(steps: range) -> dict[str, Tensor | None]:
    """(1/n) sum over devices of the gradients, where any device has one."""
    model = Model()
    for rank in range(SIZE):
        for step in steps:
            (model(inputs(rank, step), rank) / SIZE).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def averaged(bucket_bytes: int, steps: range, blocked: int, group: Any) -> tuple[dict[str, Tensor | None], int]:
    transport, model, met = GlooTransport(group), Model(), []

    def meet(call: Any) -> None:
        met.append(1)
        call()

    average = GradientAverage(ExactMean(transport), transport, meet, bucket_bytes)
    for step in steps:
        average.watch(list(model.parameters()))
        average.begin()
        loss = model(inputs(transport.rank, step), transport.rank)
        if step < blocked:
            with average.blocked():
                loss.backward()
        else:
            loss.backward()
            average.finish()
    return {name: p.grad for name, p in model.named_parameters()}, len(met)


@pytest.mark.parametrize("bucket_bytes", [1, 200, 2**20])
@pytest.mark.parametrize(("steps", "blocked"), [(1, 0), (3, 2)], ids=["one", "accumulated"])
def test_gradients_are_the_mean_over_devices(bucket_bytes: int, steps: int, blocked: int) -> None:
    reference = expected(range(steps))
    for measured, met in world(SIZE, lambda group: averaged(bucket_bytes, range(steps), blocked, group)):
        assert met == 1
        assert measured["never"] is None
        assert measured["frozen"] is None
        for name, value in reference.items():
            torch.testing.assert_close(measured[name], value, rtol=1e-6, atol=1e-6)


def views(group: Any) -> tuple[list[int], list[int], bool]:
    """Storages of the gradients in order; strides of a filter's; whether a second backward adds to them."""
    transport = GlooTransport(group)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    filters = nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)
    average = GradientAverage(ExactMean(transport), transport, lambda call: call(), 2**20)
    average.watch([*module.parameters(), filters.weight])
    x, image = torch.ones(3, 4), torch.ones(1, 2, 3, 3)

    def backward() -> None:
        average.begin()
        (module(x).square().sum() + filters(image).sum()).backward()
        average.finish()

    backward()
    gradients = [p.grad for p in module.parameters()]
    before = [g.clone() for g in gradients]
    assert filters.weight.grad is not None
    strides = list(filters.weight.grad.stride())
    storages = [g.untyped_storage().data_ptr() for g in gradients]
    backward()
    twice = all(torch.allclose(p.grad, 2 * g) for p, g in zip(module.parameters(), before, strict=True))
    return storages, strides, twice


def test_gradients_are_views_of_what_travelled() -> None:
    """Nothing is copied back; strides are the parameters', as fused optimizers ask for."""
    for storages, strides, twice in world(2, views):
        assert len(set(storages)) == 1
        assert strides == list(torch.empty(2, 2, 3, 3).to(memory_format=torch.channels_last).stride())
        assert twice


def embedded(group: Any) -> list[Tensor | None]:
    """Gradients of two steps' embeddings of which the second isn't used on device 1."""
    transport = GlooTransport(group)
    tables = [nn.Embedding(4, 2, sparse=True, _weight=torch.ones(4, 2)) for _ in range(2)]
    average = GradientAverage(ExactMean(transport), transport, lambda call: call(), 2**20)
    average.watch([table.weight for table in tables])
    for _ in range(2):
        average.begin()
        rows = torch.tensor([transport.rank, 0])
        sum(table(rows).sum() for table in tables[: 1 if transport.rank == 1 else 2]).backward()
        average.finish()
    return [table.weight.grad for table in tables]


def test_sparse_gradients_stay_sparse() -> None:
    """As SparseAdam asks for; of the mean the rows that some device has."""
    for measured in world(SIZE, embedded):
        assert all(gradient.is_sparse for gradient in measured)
        used, sometimes = (gradient.coalesce() for gradient in measured)
        assert used.indices().tolist() == [[0, 1, 2]]
        torch.testing.assert_close(used.to_dense(), torch.tensor([[4.0], [1], [1], [0]]).expand(4, 2) * 2 / SIZE)
        torch.testing.assert_close(sometimes.to_dense(), torch.tensor([[3.0], [0], [1], [0]]).expand(4, 2) * 2 / SIZE)


def without_loss(group: Any) -> Tensor | None:
    """Device 1 has nothing to learn from in this step."""
    transport, x = GlooTransport(group), nn.Parameter(torch.ones(2))
    average = GradientAverage(ExactMean(transport), transport, lambda call: call(), 2**20)
    average.watch([x])
    average.begin()
    if transport.rank != 1:
        (6 * x).sum().backward()
    average.finish()
    return x.grad


def test_a_device_without_a_loss_counts_as_zero() -> None:
    for gradient in world(SIZE, without_loss):
        torch.testing.assert_close(gradient, torch.full((2,), 4.0))


def unfrozen(group: Any) -> list[Tensor | None]:
    transport, x, y = GlooTransport(group), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    y.requires_grad_(False)
    average = GradientAverage(ExactMean(transport), transport, lambda call: call(), 2**20)
    found = []
    for step in range(2):
        y.requires_grad_(step == 1)
        average.watch([x, y])
        (transport.rank * (x + y)).sum().backward()
        found.append(None if y.grad is None else y.grad.clone())
    average.close()
    x.grad = None
    (transport.rank * x).sum().backward()
    return [*found, x.grad]


def test_parameters_that_are_unfrozen_later_are_averaged_and_closed_hooks_are_gone() -> None:
    for rank, (frozen, after, closed) in enumerate(world(SIZE, unfrozen)):
        assert frozen is None
        torch.testing.assert_close(after, torch.ones(2))
        torch.testing.assert_close(closed, torch.full((2,), float(rank)))


class Elsewhere(Mirror):
    """The other device has a gradient of everything."""

    def all_reduce(self, tensor: Tensor) -> Pending:
        tensor[:-2].add_(1)
        tensor[-2:].mul_(2)  # it is at the same place
        return Together([])


@every_device
@pytest.mark.parametrize("hosts", [Mirror(), Elsewhere()], ids=["unused", "used elsewhere"])
def test_no_host_waits_for_its_device_where_a_gradient_is_missing(hosts: Mirror, device: str) -> None:
    """Of a device whose mirror has the same gradients."""
    used, missing = (nn.Parameter(torch.ones(2, device=device)) for _ in range(2))
    average = GradientAverage(ExactMean(Mirror()), hosts, lambda call: call(), 2**20)
    average.watch([used, missing])
    for waits in (True, False):
        used.grad = missing.grad = None
        average.begin()
        with nullcontext() if waits else without_waiting(device):
            (3 * used).sum().backward()
            average.finish()
    assert used.grad.tolist() == [3.0, 3.0]
    assert (missing.grad is None) == (type(hosts) is Mirror)


class Late(Together):
    """A message that takes a twentieth of a second."""

    def wait(self) -> None:
        time.sleep(0.05)


class Slow(Mirror):
    def all_reduce(self, tensor: Tensor) -> Pending:
        super().all_reduce(tensor)
        return Late([])


def test_waits_for_other_workers_are_counted() -> None:
    rows = [nn.Parameter(torch.ones(2**18)) for _ in range(2)]
    average = GradientAverage(ExactMean(Slow()), Mirror(), lambda call: call(), 2**20)
    average.watch(rows)
    assert average.wait_seconds == 0
    sum(row.sum() for row in rows).backward()  # type: ignore[union-attr]
    average.begin()
    average.finish()
    assert average.wait_seconds >= 0.1


def apart(group: Any) -> list[str]:
    """Worker 1 skips an update behind the second average; what each says in the third, or the fourth."""
    transport, rank = GlooTransport(group), group.rank()
    p, updates, said = nn.Parameter(torch.ones(3)), 0, []
    average = GradientAverage(ExactMean(transport), transport, lambda call: call(), 2**20, lambda: (len(said), updates))
    average.watch([p])
    for step in range(4):
        try:
            (p * step).sum().backward()
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
        updates += rank == 0 or step != 1
    return said


def test_a_skipped_update_is_named_in_the_next_average() -> None:
    for rank, (first, second, third, fourth) in enumerate(world(2, apart)):
        assert first == second == third == ""
        assert f"worker {rank} averaged gradients of its batch 2 after {2 - rank} updates" in fourth
        assert "skipped optimizer.step()" in fourth


def codes(group: Any) -> list[Tensor]:
    transport, number = GlooTransport(group), nn.Parameter(torch.zeros(5, dtype=torch.complex64))
    mean = CompressedMean(Int8(), *itertools.islice(iter(groups(group), None), 2), torch.device("cpu"))
    average = GradientAverage(mean, transport, lambda call: call(), 2**20)
    average.watch([number])
    (number * complex(1 + group.rank(), 2)).abs().square().sum().backward()
    average.begin()
    (number.real.sum() * (1 + group.rank()) + number.imag.sum() * 2).backward()
    assert number.grad is not None
    return [number.grad]


def test_complex_gradients_travel_as_two_numbers_each() -> None:
    for (found,) in world(2, codes):
        torch.testing.assert_close(found, torch.full((5,), complex(1.5, 2)), rtol=0.02, atol=0.02)
