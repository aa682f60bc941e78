"""What a codec makes of a message, against brute force, closed forms and torch's own."""

from itertools import pairwise
from math import ceil

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_decentral.gossip import (
    BFloat16,
    Codec,
    DifferenceCompression,
    Float16,
    Float32,
    Int2,
    Int4,
    Int8,
    Plain,
    TopK,
)
from lightning_decentral.shared.compute.codec import Frame
from lightning_decentral.shared.compute.codec.blocks import MIDPOINTS, _gathered, dither, key, midpoints
from tests import simulated
from tests.gossip.codecs import instances, payload, round_trip
from tests.simulated import CUDA

CPU = torch.device("cpu")
TYPES = [torch.float64, torch.float32, torch.bfloat16]


def message(n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(n, generator=generator) * torch.rand(n, generator=generator)).to(dtype)


def formula(codec: Codec, n: int, itemsize: int) -> int:
    """The bytes that the docstrings promise for n elements."""
    match codec:
        case Plain():
            return n * itemsize
        case Float32() | BFloat16() | Float16():
            return n * min(4 if codec == Float32() else 2, itemsize)
        case Int8(block=block):
            return n + 4 * ceil(n / block)
        case Int4(block=block) | Int2(block=block):
            rest, each = n % block, 2 if isinstance(codec, Int4) else 4
            return n // block * ceil(block / each) + ceil(rest / each) + 4 * ceil(n / block)
        case TopK(fraction=fraction, block=block):
            blocks = [block] * (n // block) + [n % block] * (n % block > 0)
            return sum(ceil(fraction * b) for b in blocks) * (itemsize + 2)
        case DifferenceCompression(inner=inner):
            return formula(inner, n, itemsize)
    raise AssertionError(f"give the formula of {codec}")


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("n", [1, 8, 1000, 300_001])
@pytest.mark.parametrize("codec", instances(), ids=str)
def test_bytes_follow_the_formula_and_the_payload(codec: Codec, n: int, dtype: torch.dtype) -> None:
    assert codec.bytes(n, dtype) == formula(codec, n, dtype.itemsize)
    assert codec.bytes(n, dtype) == sum(t.numel() * t.element_size() for t in payload(codec, n, dtype))


def test_int8_is_at_least_3_9_times_smaller_than_float32() -> None:
    assert Plain().bytes(10_000, torch.float32) / Int8().bytes(10_000, torch.float32) >= 3.9


@pytest.mark.parametrize("codec", instances(), ids=str)
def test_the_message_is_left_alone_and_the_payload_filled(codec: Codec) -> None:
    sent = message(200)
    first, second = (round_trip(codec, sent, key=5) for _ in range(2))
    assert torch.equal(sent, message(200))
    assert torch.equal(first, second)
    assert bool(torch.isfinite(first).all())


@pytest.mark.parametrize(("codec", "dtype"), [
    (Plain(), torch.float64), (Float32(), torch.float32), (BFloat16(), torch.bfloat16), (Float16(), torch.float16),
])  # fmt: skip
def test_casts_are_torchs(codec: Codec, dtype: torch.dtype) -> None:
    sent = message(1000, dtype=torch.float64)
    assert torch.equal(round_trip(codec, sent), sent.to(dtype).double())
    narrow = sent.to(torch.bfloat16)
    assert torch.equal(round_trip(codec, narrow), narrow), "a type as small is sent as it is"


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("n", "block"), [(1000, 256), (300_001, 256), (50, 7), (3, 256), (140_000, 65536)])
def test_int8_against_numpy(n: int, block: int, dtype: torch.dtype) -> None:
    sent = message(n, dtype=dtype)
    quantized, scales = payload(Int8(block=block), n, dtype)
    Int8(block=block).encode(sent, (quantized, scales), Frame(3))
    x = sent.double().numpy()
    for b in range(ceil(n / block)):
        part, q = x[b * block : (b + 1) * block], quantized[b * block : (b + 1) * block].double().numpy()
        assert scales[b] == pytest.approx(np.abs(part).max() / 127, rel=1e-6)
        assert np.abs(q * float(scales[b]) - part).max() <= float(scales[b]) * (1 + 1e-4)
    wide = torch.promote_types(dtype, torch.float32)
    expected = quantized.to(wide) * scales.to(wide).repeat_interleave(block)[:n]
    assert torch.equal(round_trip(Int8(block=block), sent, key=3), expected.to(dtype))


def test_int8_is_unbiased() -> None:
    """The mean over keys is the message: each element's z-score among 10,000 keys is that of a normal sample."""
    sent, keys = message(512, dtype=torch.float64), 10_000
    mean = torch.stack([round_trip(Int8(block=16), sent, key=key(k)) for k in range(keys)]).mean(0)
    scale = sent.view(-1, 16).abs().amax(1).div(127).repeat_interleave(16)
    fraction = sent / scale - (sent / scale).floor()
    z = (mean - sent) / (scale * (fraction * (1 - fraction) / keys).sqrt().clamp(min=1e-9))
    inner = z[(fraction - 0.5).abs() < 0.499]  # the largest of a block has nothing to round
    assert len(inner) > 400
    assert float(inner.abs().max()) < 4.5
    assert 0.75 < float(inner.square().mean()) < 1.25


LEVELS: dict[type[Codec], tuple[float, float]] = {Int4: (7, 8), Int2: (1.5, 1.5)}


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("n", "block"), [(1000, 128), (300_001, 128), (50, 7), (3, 256), (1, 8), (140_000, 65536)])
@pytest.mark.parametrize("kind", LEVELS)
def test_packed_against_numpy(kind: type[Codec], n: int, block: int, dtype: torch.dtype) -> None:
    """Bits taken out of the bytes one number at a time; every level between those beside the number."""
    codec, sent, (largest, middle) = kind(block=block), message(n, dtype=dtype), LEVELS[kind]
    packed, scales = payload(codec, n, dtype)
    codec.encode(sent, (packed, scales), Frame(3))
    x, bits, stride = sent.double().numpy(), codec.bits, ceil(block * codec.bits / 8)
    decoded = round_trip(codec, sent, key=3).double().numpy()
    for b in range(ceil(n / block)):
        part, scale = x[b * block : (b + 1) * block], float(scales[b])
        held = packed[b * stride : (b + 1) * stride].numpy()
        codes = [(held[i % len(held)] >> (i // len(held) * bits)) & (2**bits - 1) for i in range(len(part))]
        assert scale == pytest.approx(np.abs(part).max() / largest, rel=1e-6)
        expected = (np.array(codes, dtype=np.float64) - middle) * scale
        assert np.abs(expected - part).max() <= scale * (1 + 1e-4)
        np.testing.assert_allclose(decoded[b * block : (b + 1) * block], expected, rtol=2**-8, atol=0)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", LEVELS)
def test_packed_is_unbiased_and_uses_every_code(kind: type[Codec]) -> None:
    sent, keys = message(512, dtype=torch.float64), 5_000
    decoded = torch.stack([round_trip(kind(block=16), sent, key=key(k)) for k in range(keys)])
    scale = sent.view(-1, 16).abs().amax(1).div(LEVELS[kind][0]).repeat_interleave(16)
    fraction = (sent / scale + LEVELS[kind][1]) % 1
    z = (decoded.mean(0) - sent) / (scale * (fraction * (1 - fraction) / keys).sqrt().clamp(min=1e-9))
    inner = z[(fraction - 0.5).abs() < 0.499]
    assert len(inner) > 400
    assert float(inner.abs().max()) < 4.5
    assert 0.75 < float(inner.square().mean()) < 1.25
    # Under codes of 4 bits the lowest, which zero's place leaves over, is never used.
    assert len(torch.unique((decoded / scale).round(decimals=3))) == round(2 * LEVELS[kind][0]) + 1


@pytest.mark.parametrize("kind", LEVELS)
def test_packed_of_extremes(kind: type[Codec]) -> None:
    for sent in (torch.zeros(8), torch.full((8,), 1e-45), torch.full((8,), 1e38), torch.tensor([7.0, -7.0, 0.0, 1.0])):
        for k in range(50):
            decoded = round_trip(kind(block=4), sent, key=key(k))
            step = sent.abs().max() / LEVELS[kind][0]
            assert bool(((decoded - sent).abs() <= step * 1.001 + 2e-38).all())


@pytest.mark.parametrize(("kind", "share"), [(Int4, 0.95), (Int2, 0.35)])
def test_most_of_a_difference_arrives_as_the_docs_say(kind: type[Codec], share: float) -> None:
    sent = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    assert float((round_trip(kind(), sent) - sent).square().sum() / sent.square().sum()) < 1 - share


def test_int8_of_extremes() -> None:
    tiny = torch.full((8,), 1e-45)
    for sent in (torch.zeros(8), tiny, torch.full((8,), 3e38), torch.tensor([127.0, -127.0, 0.0, 1.0])):
        for k in range(200):
            decoded = round_trip(Int8(block=4), sent, key=key(k))
            assert bool(((decoded - sent).abs() <= sent.abs().max() / 127 * 1.001 + 1.2e-38).all())


@pytest.mark.parametrize("n", [64, 1000, 9001])
@pytest.mark.parametrize(("fraction", "block"), [(0.1, 4096), (0.3, 8), (1.0, 16), (1e-9, 100)])
def test_top_k_against_sorting(n: int, fraction: float, block: int) -> None:
    sent = message(n)
    expected = torch.zeros(n)
    for start in range(0, n, block):
        part = range(start, min(start + block, n))
        for i in sorted(part, key=lambda i: -abs(float(sent[i])))[: ceil(fraction * len(part))]:
            expected[i] = sent[i]
    assert torch.equal(round_trip(TopK(fraction=fraction, block=block), sent), expected)


def test_top_k_places_reach_the_end_of_the_largest_block() -> None:
    sent = torch.zeros(65536)
    sent[[0, 32767, 32768, 65535]] = torch.tensor([1.0, -2.0, 3.0, -4.0])
    assert torch.equal(round_trip(TopK(fraction=1e-4, block=65536), sent), sent)


@pytest.mark.parametrize(
    "inner",
    [Int8(block=8), Int4(block=8), Int2(block=8), TopK(fraction=0.1, block=50), BFloat16()],
    ids=str,
)
def test_differences_vanish(inner: Codec) -> None:
    """The hearer of a message that stays gets to know it to rounding."""
    codec, sent = DifferenceCompression(inner), message(200, dtype=torch.float64)
    estimate, decoded = torch.zeros_like(sent), torch.empty_like(sent)
    errors = []
    for step in range(60):
        frame = Frame(key(step), estimate)
        parts = payload(codec, 200, sent.dtype)
        codec.encode(sent, parts, frame)
        codec.decode(parts, decoded, frame)
        estimate.copy_(decoded)
        errors.append(float((decoded - sent).norm()))
    assert errors[0] > 1e-3
    assert errors[-1] < 1e-8
    assert all(b <= a + 1e-12 for a, b in pairwise(errors))


@pytest.mark.sampled
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 5, 130, 131, 199])
@pytest.mark.parametrize("codec", instances(), ids=str)
def test_what_is_not_finite_decodes_to_what_is_not_finite(codec: Codec, place: int, bad: float) -> None:
    """Small integers and chosen places hide nothing."""
    sent = message(200)
    sent[place] = bad
    assert not bool(torch.isfinite(round_trip(codec, sent)).all())


def test_keys_of_different_numbers_differ() -> None:
    assert len({key(a, b) for a in range(50) for b in range(50)}) == 2500


def test_dither_is_uniform_and_a_function_of_key_and_place() -> None:
    piece, number = 60_000, 250_000
    ends = [*range(0, number, piece), number]

    def noise(k: int) -> Tensor:
        return torch.cat([dither(number, k, piece, CPU)(a, b, torch.empty(b - a)) for a, b in pairwise(ends)])

    first, again, other = noise(key(1)), noise(key(1)), noise(key(2))
    assert torch.equal(first, again)
    # From within a piece, over ends of others, in another type.
    for a, b in ((130_000, 140_000), (59_999, 180_001), (0, number)):
        out = torch.empty(b - a, dtype=torch.float64)
        assert dither(number, key(1), piece, CPU)(a, b, out) is out
        assert torch.equal(first[a:b].double(), out)
    counts = torch.histc(first.double(), 256, -0.5, 0.5)
    assert float((counts / (number / 256) - 1).abs().max()) < 0.25
    for a, b in ((first, other), *((first[d:], first[:-d]) for d in (1, 2, 256, piece))):
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 4 / MIDPOINTS**0.5
    starts = torch.tensor([5, MIDPOINTS - 1, 60_000, 7, 9], dtype=torch.int32)
    views = torch.cat([midpoints(CPU)[s : s + piece] for s in starts.tolist()])
    for start, stop in ((0, number), (70_000, number), (120_000, 180_000), (249_990, number)):
        assert torch.equal(_gathered(midpoints(CPU), starts, piece, start, stop), views[start:stop])


@pytest.mark.parametrize(("piece", "number"), [(256, 256 * 3), (192, 1000), (2**16, 70_000), (5, 7)])
def test_the_dither_of_a_device_is_the_hosts(piece: int, number: int) -> None:
    """From the first place and from within a piece, over ends of pieces."""
    expected = dither(number, 7, piece, CPU)(0, number, torch.empty(number))
    with simulated.device(0):
        noise = dither(number, 7, piece, CUDA)
        for start in (0, piece - 1, piece):
            for stop in (start + 1, number):
                out = torch.empty(stop - start, device=CUDA)
                assert torch.equal(noise(start, stop, out).cpu(), expected[start:stop])


def test_each_midpoint_of_the_dither_is_as_likely() -> None:
    """Of one place, over the places that a piece may begin at: exactly."""
    first, again = midpoints(CPU).split(MIDPOINTS)
    assert torch.equal(first, again)
    assert torch.equal(first.sort().values, (torch.arange(MIDPOINTS) + 0.5) / 2**16 - 0.5)


@pytest.mark.parametrize("default", [torch.float16, torch.bfloat16], ids=str)
def test_the_dither_does_not_follow_the_default_type(default: torch.dtype) -> None:
    """Half precision changes it for as long as a training step takes, in every thread."""
    expected = midpoints(CPU)
    midpoints.cache_clear()
    torch.set_default_dtype(default)
    try:
        assert torch.equal(midpoints(CPU), expected)
        assert midpoints(CPU).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
        midpoints.cache_clear()


@pytest.mark.sampled
@pytest.mark.parametrize("n", [1000, 300_001])
@pytest.mark.parametrize("dtype", [*TYPES, torch.float16], ids=str)
@pytest.mark.parametrize("codec", instances(), ids=str)
def test_what_replaces_the_message_is_what_is_decoded(codec: Codec, dtype: torch.dtype, n: int) -> None:
    sent = message(n, dtype=dtype)
    estimate = message(n, dtype=dtype).flip(0) if codec.remembers else None
    one, two = payload(codec, n, dtype), payload(codec, n, dtype)
    replaced, left, decoded = sent.clone(), sent.clone(), torch.empty_like(sent)
    codec.encode(sent, one, Frame(3, estimate))
    codec.decode(one, decoded, Frame(0, estimate))
    codec.replace(replaced, two, Frame(3, estimate))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert torch.equal(replaced, decoded)
    codec.residual(left, two, Frame(3, estimate))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert torch.equal(left, sent - decoded)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: TopK(fraction=0), r"fraction must be in \(0, 1\], got 0"),
        (lambda: TopK(fraction=1.5), r"fraction must be in \(0, 1\], got 1.5"),
        (lambda: TopK(fraction=float("nan")), r"fraction must be in \(0, 1\], got nan"),
        (lambda: TopK(block=0), r"block must be in 1 .. 65536, got 0"),
        (lambda: Int8(block=0), r"block must be in 1 .. 65536, got 0: 256"),
        (lambda: Int8(block=65537), r"block must be in 1 .. 65536, got 65537"),
        (lambda: Int4(block=0), r"block must be in 1 .. 65536, got 0: 128"),
        (
            lambda: DifferenceCompression(DifferenceCompression(Int8())),
            r"inner codec keeps estimates, too, .*: unwrap it",
        ),
    ],
)
def test_bad_options_are_refused_in_one_line(build: object, text: str) -> None:
    with pytest.raises(ValueError, match=text) as error:
        build()  # type: ignore[operator]
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("codec", instances(), ids=str)
def test_only_plain_takes_what_is_not_real_floating_point(codec: Codec, dtype: torch.dtype) -> None:
    if codec == Plain():
        assert codec.bytes(10, dtype) == 10 * dtype.itemsize
        return
    said = rf"{type(codec).__name__} encodes real floating-point numbers, got {dtype}: use Plain\(\)"
    with pytest.raises(ValueError, match=said):
        codec.bytes(10, dtype)
