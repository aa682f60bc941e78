"""Rounds on the host's own sockets and with one's own echo: what is counted, and the lines through it."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import pytest
import torch
from torch import nn

from lightning_decentral.gossip import Codec, Exponential, Gossip, Int8, Own, Plain
from lightning_decentral.gossip import round_cost as echo
from lightning_decentral.gossip.round_cost import CODECS, LoopbackTransport, round_works
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.gossip.wire.peer import PeerExchange
from lightning_decentral.shared.compute.buckets import bucket_bytes_of
from lightning_decentral.shared.plan.profile import RoundWork
from lightning_decentral.shared.wire.transport import Message
from tests.gossip.wire.test_exchange import Row

CPU = torch.device("cpu")


@pytest.mark.parametrize("received", [1, 3])
def test_a_worker_that_hears_itself_stays_where_it_is(received: int) -> None:
    exchange = PeerExchange(Exponential(), Own(), LoopbackTransport(1 << received), CPU, Plain())
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    mixer = Mixer([Row(x.clone())], Gossip(), exchange, delay=1)
    for _ in range(3):
        mixer.step()
    mixer.drain()
    assert torch.allclose(mixer.buckets[0].flat, x, atol=1e-6)
    assert exchange.traffic().bytes_sent == 3 * received * (4 * 1000 + 24)
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
    received, sent = torch.zeros(2, 3), torch.ones(2, 3)
    silent = LoopbackTransport(2)
    silent.silent = True
    silent.exchange([Message(1, part, tag) for tag, part in enumerate(sent)],
                    [Message(1, part, tag) for tag, part in enumerate(received)])  # fmt: skip
    assert received.tolist() == [[1.0] * 3, [0.0] * 3]


@pytest.mark.parametrize("size", [4, 2**20, 5 * 2**20, 2**26])
def test_there_are_as_many_buckets_as_in_training(size: int) -> None:
    parameters = [nn.Parameter(torch.empty(size // 4, device="meta"))]
    found = echo._buckets(size, torch.device("meta"))
    assert sum(bucket.flat.numel() for bucket in found) == size // 4
    assert len(found) == -(-size // bucket_bytes_of(parameters)) <= 8


def test_a_device_without_a_stopwatch_has_no_rounds() -> None:
    assert round_works(1000, torch.device("mps")) == ()


class Line:
    """A meter of what is known."""

    received = (1, 2)

    def __init__(self, work: RoundWork, sizes: Sequence[int]) -> None:
        self.work, self.sizes = work, sizes

    def seconds(self, codec: Codec, received: int, size: int) -> float:
        return self.work.seconds(size, received)


@pytest.mark.parametrize(
    "numbers", [(2e-9, 3e-10, 1e-3, 2e-4), (0.0, 1e-9, 0.0, 1e-3), (1e-9, 0.0, 1e-3, 0.0), (0.0, 0.0, 1e-4, 1e-4)]
)
def test_the_line_through_few_and_many_neighbours_and_two_sizes(numbers: tuple[float, ...]) -> None:
    work = RoundWork("Int8(block=256)", *numbers)
    assert astuple(echo._work(Int8(), Line(work, [1000, 1_000_000])))[1:] == pytest.approx(numbers, abs=1e-12)


def test_of_one_size_all_is_by_the_byte() -> None:
    found = echo._work(Plain(), Line(RoundWork("Plain()", 2e-9, 1e-9, 1e-3), [1_000_000]))
    assert found.round_seconds == found.message_seconds == 0
    assert found.seconds(1_000_000, 1) == pytest.approx(1e-3 + 3e-3)


@pytest.mark.parametrize("seconds", [(3.0, 1.0, 4.0, 2.0), (1.0, 9.0, 0.5, 8.0), (5.0, 5.0, 1.0, 9.0)])
def test_a_disturbed_measurement_has_no_negative_part(seconds: tuple[float, ...]) -> None:
    class Disturbed(Line):
        def seconds(self, codec: Codec, received: int, size: int) -> float:
            return seconds[2 * (size == self.sizes[-1]) + received - 1]

    found = echo._work(Plain(), Disturbed(RoundWork("Plain()"), [1000, 1_000_000]))
    assert min(astuple(found)[1:]) >= 0
    assert found.seconds(1_000_000, 1) == pytest.approx(seconds[2]), "that with one neighbour was measured"


def test_what_is_rounded_below_0_is_0() -> None:
    """Seconds that are all by the byte, or all by the neighbour: what is left of them may round to -1e-22."""
    seconds, size = 7e-6, 100_000
    assert seconds - seconds / size * size < 0
    assert echo._line([(65536, 0.0), (size, seconds)]) == (0.0, seconds / size)
    whole = 23e-6
    assert whole - 3 * (whole / 3) < 0
    assert echo._parts((3, 5), whole, 5 * whole) == (0.0, whole / 3)


def test_a_devices_number_is_the_median_of_rounds_that_begin_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, pauses = itertools.count(), itertools.count()

    def duration(round_of_gossip: object, device: torch.device) -> float:
        assert callable(round_of_gossip)
        round_of_gossip()
        return float(next(taken))

    monkeypatch.setattr(echo, "duration", duration)
    found = echo.DeviceMeter(4000, CPU, lambda: next(pauses) and None).seconds(Int8(), 1, 4000)
    assert found == echo.WARM_UP + (echo.REPEATS - 1) / 2
    assert next(pauses) == next(taken) == echo.WARM_UP + echo.REPEATS


@pytest.mark.threads
def test_a_hosts_number_is_a_workers_share_of_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that every round of every worker moves on by one; sleeping isn't counted."""
    rounds = []

    class Counted(Mixer):
        def step(self, *of: Any) -> None:
            super().step(*of)
            rounds.append(1)

    monkeypatch.setattr(echo, "Mixer", Counted)
    monkeypatch.setattr(echo, "process_time", lambda: float(len(rounds)))
    meter = echo.HostMeter(4000, lambda: time.sleep(0.001))
    assert meter.sizes == [4000]
    for received in meter.received:
        assert meter.seconds(Int8(), received, 4000) == 1


@pytest.mark.threads
def test_workers_of_the_measurement_agree_as_those_of_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    landed = []

    class Kept(Mixer):
        def drain(self) -> None:
            super().drain()
            landed.append(self.buckets[0].flat.clone())
            assert not self.exchange.traffic().refused

    monkeypatch.setattr(echo, "Mixer", Kept)
    echo.HostMeter(4000, lambda: None).seconds(Int8(), 2, 4000)
    assert len(landed) == 4
    assert all(x == pytest.approx(torch.ones(1000), rel=0.05) for x in landed)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.threads), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_every_codec_is_measured_on_every_device(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(echo, "WARM_UP", 3)
    monkeypatch.setattr(echo, "REPEATS", 4)
    for size in (4, 100_000):
        works = round_works(size, torch.device(device))
        assert len(works) == len(CODECS)
        assert all(0 < work.seconds(size, 1) < 10 for work in works)
