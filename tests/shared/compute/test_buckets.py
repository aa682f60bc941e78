"""Buckets: parameters as views of flat memory, and how they are packed."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from lightning_decentral.shared.compute.buckets import SHORT, TAIL, Bucket, is_short, pack, with_tail
from tests import simulated
from tests.simulated import CUDA


class Mixed(nn.Module):
    """Tied weights, two dtypes, channels_last, a frozen parameter, an empty one and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.half = nn.Linear(3, 3, dtype=torch.bfloat16)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.empty = nn.Parameter(torch.empty(0))
        self.norm = nn.BatchNorm1d(3)


@pytest.fixture
def module() -> Mixed:
    torch.manual_seed(0)
    return Mixed()


@pytest.mark.parametrize("bucket_bytes", [1, 600, 10**9])
def test_parameters_stay_what_they_are(module: Mixed, bucket_bytes: int) -> None:
    before = copy.deepcopy(module.state_dict())
    identities = {name: (id(p), p.stride(), p.requires_grad, p.dtype) for name, p in module.named_parameters()}
    pack(module.parameters(), bucket_bytes)
    after = module.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[k], after[k]) and before[k].dtype == after[k].dtype for k in before)
    assert identities == {n: (id(p), p.stride(), p.requires_grad, p.dtype) for n, p in module.named_parameters()}
    assert module.head.weight is module.embed.weight
    assert module.conv.weight.is_contiguous(memory_format=torch.channels_last)


def test_a_change_of_the_bucket_is_a_change_of_the_parameters(module: Mixed) -> None:
    buckets = pack(module.parameters())
    for bucket in buckets:
        bucket.flat.fill_(2.0)
    assert all(bool((p == 2.0).all()) for p in module.parameters())
    assert {b.flat.dtype for b in buckets} == {torch.float32, torch.bfloat16}


def test_replaced_storage_is_adopted_again(module: Mixed) -> None:
    (bucket, *_) = pack(module.parameters())
    module.conv.weight.data = torch.ones_like(module.conv.weight)
    bucket.flat.zero_()
    assert bool((module.conv.weight == 1).all())
    bucket.adopt()
    bucket.flat.zero_()
    assert bool((module.conv.weight == 0).all())


def test_strides_stay_as_they_were(module: Mixed) -> None:
    """Of a rule's state, and of what is under way, each place is one number's."""
    (bucket, *_) = pack(module.parameters())
    before, values = bucket.flat.clone(), copy.deepcopy(module.state_dict())
    module.conv.to(memory_format=torch.contiguous_format)
    with pytest.warns(UserWarning, match=r"got strides .* after set-up"):
        bucket.adopt()
    assert torch.equal(bucket.flat, before)
    assert module.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert all(torch.equal(values[k], v) for k, v in module.state_dict().items())


def test_what_is_transposed_or_exchanged_within_the_bucket_keeps_its_numbers() -> None:
    one, other = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))
    (bucket,) = pack([one, other])
    expected = other.detach().clone(), one.detach().t().clone()
    one.data, other.data = other.data, one.data.t()
    with pytest.warns(UserWarning, match="got strides"):
        bucket.adopt()
    assert all(map(torch.equal, expected, (one, other)))
    assert torch.equal(bucket.flat.view(2, -1)[:, :16], torch.stack([one.flatten(), other.flatten()]))


def test_another_type_is_refused(module: Mixed) -> None:
    (bucket, *_) = pack(module.parameters())
    module.conv.double()
    with pytest.raises(ValueError, match=r"became shape .*torch.float64 after set-up"):
        bucket.adopt()


def test_released_parameters_have_a_storage_of_their_own(module: Mixed) -> None:
    buckets = pack(module.parameters())
    expected = copy.deepcopy(module.state_dict())
    for bucket in buckets:
        bucket.release()
        bucket.flat.zero_()
    assert all(torch.equal(expected[k], v) for k, v in module.state_dict().items())
    assert module.conv.weight.untyped_storage().nbytes() == module.conv.weight.numel() * 4
    assert module.conv.weight.is_contiguous(memory_format=torch.channels_last)


def test_an_optimizer_does_not_notice(module: Mixed) -> None:
    """Three steps of Adam in buckets equal three steps without, bit for bit."""
    plain = copy.deepcopy(module)
    pack(module.parameters())
    for m in (plain, module):
        optimizer = torch.optim.Adam([m.embed.weight, *m.conv.parameters()], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            images = torch.arange(75.0).view(1, 3, 5, 5)
            (m.conv(images).square().mean() + m.head(m.embed(torch.tensor([1, 2]))).square().sum()).backward()
            optimizer.step()
    assert all(
        torch.equal(a, b) for a, b in zip(plain.state_dict().values(), module.state_dict().values(), strict=True)
    )


def test_padding_is_what_no_parameter_has(module: Mixed) -> None:
    for bucket in pack(module.parameters()):
        bucket.flat.copy_(torch.arange(len(bucket.flat)))
        values = [p.detach().clone() for p in bucket.parameters]
        padding = bucket.padding
        assert len(padding) == len(bucket.flat) - sum(p.numel() for p in bucket.parameters)
        kept = torch.cat([padding, *(v.permute(0, 2, 3, 1).flatten() if v.dim() == 4 else v.flatten() for v in values)])
        assert torch.equal(kept.sort().values, bucket.flat.sort().values)
        bucket.padding = torch.zeros_like(padding)
        assert not bucket.padding.any()
        assert all(map(torch.equal, bucket.parameters, values))


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
