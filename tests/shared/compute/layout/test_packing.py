"""Which parameters share a bucket, and where the last bucket is cut."""

from functools import partial

import pytest
import torch
from torch import nn

from lightning_decentral.shared.compute.buckets import Bucket
from lightning_decentral.shared.compute.layout.packing import SHORT, TAIL, is_short, pack, with_tail
from tests import simulated
from tests.simulated import CUDA


def test_no_bucket_over_its_bytes_unless_one_parameter_is() -> None:
    parameters = [nn.Parameter(torch.zeros(n)) for n in (7, 21, 200, 5, 90, 1, 140)]
    for bucket in pack(parameters, 600):
        payload = sum(p.numel() * p.element_size() for p in bucket.parameters)
        assert payload <= 600 or len(bucket.parameters) == 1


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("shape", [(1024, 512), (700, 24, 5, 5), (600_001,)], ids=str)
def test_a_long_last_bucket_has_a_tail_of_its_own(shape: tuple[int, ...], parts: int) -> None:
    """Both of whole parts, and together the bucket."""
    first, second = nn.Parameter(torch.zeros(1000, 100)), nn.Parameter(torch.randn(shape))
    make = partial(Bucket, parts=parts)
    buckets = pack([first, second], 2**20, make)
    whole, head, tail = with_tail(buckets)
    assert whole is buckets[0]
    assert torch.equal(torch.cat([head.flat, tail.flat]), buckets[1].flat)
    assert head.flat.data_ptr() == buckets[1].flat.data_ptr()
    elements = sum(len(b.flat) for b in buckets)
    assert elements / TAIL <= len(tail.flat) <= elements / SHORT
    assert is_short(len(tail.flat), elements)
    assert len(tail.flat) % (32 * parts) == 0


@pytest.mark.parametrize("shapes", [[(0,)], [(100, 100)], [(600, 600), (10, 10)]], ids=str)
def test_what_is_small_or_short_stays_whole(shapes: list[tuple[int, ...]]) -> None:
    buckets = pack([nn.Parameter(torch.zeros(shape)) for shape in shapes], 400_000)
    assert with_tail(buckets) == buckets


def test_a_tail_begins_where_a_parameter_does() -> None:
    """Where one begins at the right distance from the end, so that none is cut; of several the last one."""
    buckets = pack([nn.Parameter(torch.zeros(shape)) for shape in ((600, 1000), (20, 1000), (10, 1000), (64,))], 10**9)
    head, tail = with_tail(buckets)
    assert (len(head.flat), len(tail.flat)) == (600_000, 30_080)  # each of whole 32 elements


def test_spans_adopt_replaced_storage() -> None:
    parameter = nn.Parameter(torch.ones(1024, 512))
    spans = with_tail(pack([parameter]))
    parameter.data = torch.full_like(parameter, 3.0)
    for span in spans:
        span.adopt()
    assert len(spans) == 2
    assert all(bool((span.flat == 3).all()) for span in spans)
    spans[1].flat.zero_()
    assert not parameter[-1].any()


def test_a_device_has_few_buckets_and_no_tail() -> None:
    layers = [nn.Linear(512, 512, bias=False) for _ in range(12)]  # 1 MiB each
    assert len(with_tail(pack(p for layer in layers for p in layer.parameters()))) > 2
    with simulated.device(0):
        there = [p for layer in layers for p in layer.to(CUDA).parameters()]
        assert len(with_tail(pack(there))) == 1
        assert len(with_tail(pack(there, 2**21))) == 6


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="bucket_bytes must be positive, got 0"):
        pack([nn.Parameter(torch.zeros(1))], 0)
    with pytest.raises(ValueError, match="run one batch through it"):
        pack(nn.LazyLinear(3).parameters())
