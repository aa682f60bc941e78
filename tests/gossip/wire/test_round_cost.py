"""Rounds with one's own echo: what is counted, and the line through it."""

import itertools

import pytest
import torch
from torch import nn

from lightning_decentral.gossip import Codec, Exponential, Gossip, Int8, Own, Plain
from lightning_decentral.gossip.wire import round_cost as echo
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.gossip.wire.peer import PeerExchange
from lightning_decentral.gossip.wire.round_cost import CODECS, LoopbackTransport, round_works
from lightning_decentral.shared.compute.buckets import bucket_bytes_of
from lightning_decentral.shared.wire.transport import Message
from tests.gossip.wire.test_exchange import Row

CPU = torch.device("cpu")


@pytest.mark.parametrize("heard", [1, 3])
def test_a_worker_that_hears_itself_stays_where_it_is(heard: int) -> None:
    exchange = PeerExchange(Exponential(), Own(), LoopbackTransport(1 << heard), CPU, Plain())
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    mixer = Mixer([Row(x.clone())], Gossip(), exchange, delay=1)
    for _ in range(3):
        mixer.step()
    mixer.drain()
    assert torch.allclose(mixer.buckets[0].flat, x, atol=1e-6)
    assert exchange.traffic().bytes_sent == 3 * heard * (4 * 1000 + 24)
    assert not exchange.traffic().refused


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_what_was_said_once_is_heard_on_without_a_copy(codec: Codec) -> None:
    silent = LoopbackTransport(8)
    exchange = PeerExchange(Exponential(), Own(), silent, CPU, codec)
    mixer = Mixer([Row(torch.full((1000,), 2.0))], Gossip(), exchange, delay=1)
    for step in range(9):
        silent.silent = step > 3
        mixer.step()
    mixer.drain()
    assert mixer.buckets[0].flat == pytest.approx(torch.full((1000,), 2.0), rel=0.05)
    assert not exchange.traffic().refused, "then it would have been mixed otherwise"


def test_headers_come_on_and_only_they() -> None:
    heard, sent = torch.zeros(2, 3), torch.ones(2, 3)
    silent = LoopbackTransport(2)
    silent.silent = True
    silent.exchange([Message(1, part, tag) for tag, part in enumerate(sent)],
                    [Message(1, part, tag) for tag, part in enumerate(heard)])  # fmt: skip
    assert heard.tolist() == [[1.0] * 3, [0.0] * 3]


@pytest.mark.parametrize("size", [4, 2**20, 5 * 2**20, 2**26])
def test_there_are_as_many_buckets_as_in_training(size: int) -> None:
    parameters = [nn.Parameter(torch.empty(size // 4, device="meta"))]
    found = echo._buckets(size, torch.device("meta"))
    assert sum(bucket.flat.numel() for bucket in found) == size // 4
    assert len(found) == -(-size // bucket_bytes_of(parameters)) <= 8


def test_a_device_without_a_stopwatch_has_no_rounds() -> None:
    assert round_works(1000, torch.device("mps")) == ()


@pytest.mark.parametrize(("own", "heard"), [(2e-9, 3e-10), (0.0, 1e-9), (1e-9, 0.0)])
def test_the_line_through_one_and_three_neighbours(own: float, heard: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(codec: object, count: int, size: int, *_: object) -> float:
        return (own + count * heard) * size

    monkeypatch.setattr(echo, "_seconds", seconds)
    for work, codec in zip(round_works(1_000_000, CPU), CODECS, strict=True):
        assert work.codec == repr(codec)
        assert work.own_seconds_per_byte == pytest.approx(own, abs=1e-15)
        assert work.heard_seconds_per_byte == pytest.approx(heard)


@pytest.mark.parametrize(("few", "many"), [(3.0, 1.0), (1.0, 9.0)])
def test_a_disturbed_measurement_has_no_negative_part(few: float, many: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(echo, "_seconds", lambda codec, count, size, *_: few if count == 1 else many)
    (work, *_) = round_works(1000, CPU)
    assert min(work.own_seconds_per_byte, work.heard_seconds_per_byte) >= 0
    assert 1000 * work.seconds_per_byte(1) == pytest.approx(few), "that with one neighbour was measured"


def test_a_number_is_the_median_of_rounds_that_begin_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, pauses = itertools.count(), itertools.count()

    def duration(round_of_gossip: object, device: torch.device) -> float:
        assert callable(round_of_gossip)
        round_of_gossip()
        return float(next(taken))

    monkeypatch.setattr(echo, "duration", duration)
    found = echo._seconds(Int8(), 1, 4000, CPU, lambda: next(pauses) and None)
    assert found == echo.WARM_UP + echo.REPEATS // 2
    assert next(pauses) == next(taken) == echo.WARM_UP + echo.REPEATS


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_codec_is_measured_on_every_device(device: str) -> None:
    for size in (4, 100_000):
        works = round_works(size, torch.device(device))
        assert len(works) == len(CODECS)
        assert all(0 < size * work.seconds_per_byte(1) < 10 for work in works)
