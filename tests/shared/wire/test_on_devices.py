"""LAW: means of gradients over devices are their formulas, in any order in which streams may run, and no host waits."""

import copy
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_decentral.shared.compute.codec import BFloat16, Codec, Float32, Int8, Plain, TopK
from lightning_decentral.shared.wire.averaging.gradient_average import GradientAverage
from lightning_decentral.shared.wire.compressed_mean import mean_by
from lightning_decentral.shared.wire.owners import by_owners, each_once, row_counts
from lightning_decentral.shared.wire.pipeline_replicas import AverageGradients
from tests.shared.wire import test_compressed_mean as formula
from tests.shared.wire import test_owners as owned
from tests.shared.wire.averaging import test_gradient_average as reference
from tests.simulated import CUDA, Engine
from tests.simulated.streams import Event, Stream
from tests.simulated.wire import Make, Network, device_world, losses_read, sent_overwritten, without_waiting

pytestmark = pytest.mark.threads
SIZE = 3


def coded(codec: Codec, given: list[list[list[Tensor]]], make: Make, engine: Engine) -> list[list[Tensor]]:
    """[step][place]"""
    mean, found = mean_by(codec, make, CUDA), []
    for step, rows in enumerate(given):
        flats = [row.to(CUDA) for row in rows[make.hosts.rank]]
        with without_waiting(engine) if step else nullcontext():  # tables of noise are copied once
            formula.averaged(mean, flats)
        found.append(flats)
    return [[flat.cpu() for flat in flats] for flats in found]


def check(codec: Codec, seed: int) -> None:
    given = formula.gradients(SIZE, steps=3)
    expected = formula.expected(codec, given)
    for row in device_world(SIZE, partial(coded, codec, given), seed):
        for flats, means in zip(row, expected, strict=True):
            torch.testing.assert_close(flats, means, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("codec", [Int8(), BFloat16(), TopK(fraction=0.25, block=16)], ids=str)
def test_the_compressed_mean_of_devices_is_the_formula(codec: Codec) -> None:
    check(codec, seed=0)


@pytest.mark.parametrize("call", ["wait_stream", "wait_event"])
def test_a_compressed_mean_that_waits_for_less_is_seen(call: str) -> None:
    """On its two streams a bucket's codes are made behind the gradients, and decoded behind the owner's mean."""
    with mock.patch.object(Stream, call), pytest.raises(AssertionError):
        check(BFloat16(), seed=0)


def averaged(codec: Codec, bucket_bytes: int, make: Make, engine: Engine) -> dict[str, Tensor | None]:
    """Gradients after two backward passes, of which the first is only accumulated."""
    model = reference.Model().to(CUDA)
    average = GradientAverage(mean_by(codec, make, CUDA), make.hosts, lambda call: call(), bucket_bytes)
    inputs = [reference.inputs(make.hosts.rank, step).to(CUDA) for step in range(2)]
    average.watch(list(model.parameters()))
    average.begin()
    with without_waiting(engine):
        with average.blocked():
            model(inputs[0], make.hosts.rank).backward()
        model(inputs[1], make.hosts.rank).backward()
        average.finish()
    return {name: None if p.grad is None else p.grad.cpu() for name, p in model.named_parameters()}


@pytest.mark.sampled
@pytest.mark.parametrize("bucket_bytes", [1, 2**20])
@pytest.mark.parametrize(("codec", "error"), [(Plain(), 1e-6), (Float32(), 1e-4)], ids=str)
def test_gradients_of_devices_are_their_mean(codec: Codec, error: float, bucket_bytes: int) -> None:
    """Exact, and by the codes of a type that is nearly so, in buckets of one shape that use each other's memory."""
    expected = reference.expected(range(2))
    for seed in range(2):
        for measured in device_world(SIZE, partial(averaged, codec, bucket_bytes), seed):
            assert measured["never"] is None
            for name, value in expected.items():
                torch.testing.assert_close(measured[name], value, rtol=error, atol=error)


def whole(make: Make, engine: Engine) -> tuple[list[Tensor], list[Tensor]]:
    """(shards put together on their owners, wholes that all hold), each changed"""
    over, rank = make(), make.hosts.rank
    shards = [t.split(row_counts(len(t), SIZE))[rank].to(CUDA) for t in owned.drawn()]
    wholes = [t.to(CUDA) for t in owned.drawn()]
    with without_waiting(engine):
        each_once(summed, shards, owned.SHAPES, over)
        by_owners(summed, wholes, Plain(), over, turn=0)
    return [t.cpu() for t in shards], [t.cpu() for t in wholes]


def summed(tensors: Any) -> None:
    for tensor in tensors:
        tensor.copy_(tensor.flatten().cumsum(0).view(tensor.shape))  # every element needs those before it


def check_wholes(seed: int) -> None:
    """AssertionError where devices don't find what one host does."""
    expected = owned.drawn()
    summed(expected)
    found = device_world(SIZE, whole, seed)
    for k, tensor in enumerate(expected):
        assert torch.equal(torch.cat([shards[k] for shards, _ in found]), tensor)
        assert all(torch.equal(wholes[k], tensor) for _, wholes in found)


def replicas(way: AverageGradients, make: Make, engine: Engine) -> list[Tensor]:
    """What a stage's replicas make of their gradients; the second one lacks the first."""
    rank, like = make.hosts.rank, [t.to(CUDA) for t in owned.drawn()]
    own = [None if rank == 1 and not k else t * rank for k, t in enumerate(like)]
    bond = way.join(make, lambda: make.hosts, CUDA, 1)
    with without_waiting(engine):
        means = bond.gradients(own, like)
    return [mean.cpu() for mean in means if mean is not None]


def check_replicas(seed: int, codec: Codec = Plain()) -> None:  # noqa: B008 - a frozen value
    """AssertionError where they aren't their means."""
    expected = [t * (1 if k else 2 / 3) for k, t in enumerate(owned.drawn())]  # (0 + 1 + 2) / 3
    for means in device_world(SIZE, partial(replicas, AverageGradients(codec)), seed):
        for a, b in zip(means, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_what_is_changed_on_one_device_is_that_of_hosts() -> None:
    check_wholes(seed=1)


@pytest.mark.parametrize("codec", [Plain(), Float32()], ids=str)
def test_what_replicas_average_is_that_of_hosts(codec: Codec) -> None:
    """Also where one of them lacks a gradient: no host waits for its device to know of it."""
    check_replicas(1, codec)


def somewhere(check: Callable[[int], None]) -> None:
    """In some schedule; few operations have many in which nothing is amiss."""
    for seed in range(16):
        check(seed)


@pytest.mark.parametrize("check", [check_wholes, check_replicas])
@pytest.mark.parametrize(
    "plant",
    [partial(mock.patch.object, Stream, "wait_stream"), partial(mock.patch.object, Event, "wait"), sent_overwritten],
    ids=["sent too early", "used too early", "overwritten too early"],
)
def test_what_is_sent_used_or_overwritten_too_early_is_seen(plant: Any, check: Any) -> None:
    with plant(), pytest.raises(AssertionError):
        somewhere(check)


# ---- training steps ---------------------------------------------------------------------------------------------


STEPS = 3
NET = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3)).double()


def rows(rank: int) -> Tensor:
    return torch.randn(STEPS, 4, 6, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def trained(codec: Codec, make: Make, engine: Engine) -> list[Tensor]:
    """A small model's parameters after a few steps on this worker's own data, as `compressed` makes them."""
    model, given = copy.deepcopy(NET).to(CUDA), rows(make.hosts.rank).to(CUDA)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    average = GradientAverage(mean_by(codec, make, CUDA), make.hosts, lambda call: call(), 512)
    average.watch(list(model.parameters()))
    for step, x in enumerate(given):
        with without_waiting(engine) if step else nullcontext():  # tables of noise are copied once
            optimizer.zero_grad()
            average.begin()
            model(x).square().mean().backward()
            average.finish()
            optimizer.step()
    return [p.detach().cpu() for p in model.parameters()]


def train(codec: Codec, seed: int) -> None:
    """AssertionError where it isn't what one process makes of all data."""
    model = copy.deepcopy(NET)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        torch.stack([model(rows(rank)[step]).square().mean() for rank in range(SIZE)]).mean().backward()
        optimizer.step()
    for found in device_world(SIZE, partial(trained, codec), seed):
        for a, b in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("codec", [Plain(), Float32()], ids=str)
def test_models_on_devices_train_as_one_process(codec: Codec) -> None:
    """Forward, backward with averages beside it, update: no host waits in a step."""
    train(codec, seed=1)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("owner", "call", "codec"),
    [(Stream, "wait_stream", Float32()), (Stream, "wait_event", Float32()), (Event, "wait", Plain())],
    ids=["codes of gradients", "means of codes", "sums of gradients"],
)
def test_a_step_that_waits_for_less_is_seen(owner: type, call: str, codec: Codec) -> None:
    with mock.patch.object(owner, call), pytest.raises((AssertionError, RuntimeError)):
        train(codec, seed=0)


def test_a_step_whose_host_reads_its_loss_is_seen() -> None:
    with losses_read(), pytest.raises(AssertionError, match="_local_scalar_dense"):
        train(Plain(), seed=0)


def test_gradients_whose_memory_goes_back_before_they_were_sent_are_seen() -> None:
    """A bucket's sums are filled while the communicator still has to read them."""
    with sent_overwritten(), pytest.raises((AssertionError, RuntimeError)):
        train(Plain(), seed=0)


def test_the_simulated_network_may_be_looked_at_by_all_at_once() -> None:
    def slowly() -> dict[int, torch.Tensor]:
        time.sleep(0.002)
        return {}

    network, rows = Network(), dict[int, Any]()
    network.given = defaultdict(slowly)

    def take_part(rank: int) -> None:
        rows[rank] = network.rows("all")
        network.give("all", rank, torch.ones(1))

    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(sorted(seen) == [0, 1, 2] for seen in rows.values())
