"""LAW: means of gradients over devices are their formulas, in any order in which streams may run, and no host waits."""

from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_decentral.shared.compute.codec import BFloat16, Codec, Float32, Int8, Plain, TopK
from lightning_decentral.shared.wire.compressed_mean import mean_by
from lightning_decentral.shared.wire.gradients import GradientAverage
from tests.shared.wire import test_compressed_mean as formula
from tests.shared.wire import test_gradients as reference
from tests.simulated import CUDA, Engine
from tests.simulated.streams import Stream
from tests.simulated.wire import Make, device_world, without_waiting

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
