"""Rounds with one's own echo: what is counted, the line through it, and that these are the rounds that training has."""

import itertools

import pytest
import torch

from lightning_decentral.gossip import echo
from lightning_decentral.gossip.codec import Int8, Plain
from lightning_decentral.gossip.combine.gossip import Gossip
from lightning_decentral.gossip.echo import CODECS, Echo, round_works
from lightning_decentral.gossip.exchange import PeerExchange
from lightning_decentral.gossip.mixer import Mixer
from lightning_decentral.gossip.topology import Exponential
from lightning_decentral.gossip.weights import Own
from tests.gossip.test_wire import Row

CPU = torch.device("cpu")


@pytest.mark.parametrize("heard", [1, 3])
def test_a_worker_that_hears_itself_stays_where_it_is(heard: int) -> None:
    exchange = PeerExchange(Exponential(), Own(), Echo(1 << heard), CPU, Plain())
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    mixer = Mixer([Row(x.clone())], Gossip(), exchange, delay=1)
    for _ in range(3):
        mixer.step()
    mixer.drain()
    assert torch.allclose(mixer.buckets[0].flat, x, atol=1e-6)
    assert exchange.traffic().bytes_sent == 3 * heard * (4 * 1000 + 16)
    assert not exchange.traffic().refused


@pytest.mark.parametrize(("own", "heard"), [(2e-9, 3e-10), (0.0, 1e-9), (1e-9, 0.0)])
def test_the_line_through_one_and_three_neighbours(own: float, heard: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(codec: object, count: int, size: int, *_: object) -> float:
        return (own + count * heard) * size

    monkeypatch.setattr(echo, "_seconds", seconds)
    for work, codec in zip(round_works(1_000_000, CPU), CODECS, strict=True):
        assert work.codec == type(codec).__name__
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
        assert all(0 < work.seconds_per_byte(1) < 1 for work in works)
