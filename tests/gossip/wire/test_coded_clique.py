"""LAW: a mean in codes is its formula on every worker, to the bit the same; nothing of a way is lost in it."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_decentral.gossip import (
    Codec,
    Complete,
    DifferenceCompression,
    Every,
    Float16,
    Int4,
    Int8,
    LowRank,
    Own,
    Plain,
    PseudoGradient,
    Ring,
    TopK,
    simulate,
)
from lightning_decentral.gossip.compute.healing import Healing
from lightning_decentral.gossip.plan.traffic import copies_sent
from lightning_decentral.gossip.wire.coded_clique import CodedCliqueExchange
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.gossip.wire.overlap import OverlapExchange, StreamExchange, overlapped
from lightning_decentral.shared.compute.codec.codec import MessageLayout
from lightning_decentral.shared.compute.codec.coded_parts import GRAIN
from lightning_decentral.shared.compute.codec.counter_rng import key
from lightning_decentral.shared.wire.transport import Transport
from tests.gossip.wire.test_assembly import groups_of
from tests.gossip.wire.test_exchange import Row
from tests.shared.wire.test_compressed_mean import coded, groups
from tests.simulated import CUDA, Engine
from tests.simulated.streams import Stream
from tests.simulated.wire import Make, device_world, without_waiting
from tests.world import world

pytestmark = [pytest.mark.threads, pytest.mark.filterwarnings("ignore:worker .")]

HOST = torch.device("cpu")
RULE, TALK = PseudoGradient(lr=0.7, momentum=0.6), Every(2, Complete())
DIM, STEPS = 2 * GRAIN + 77, 10
CODECS: list[Codec] = [Int8(), Int4(), Float16(), TopK(fraction=0.25, block=16)]
Groups = Callable[[], Transport]


def start(size: int) -> Tensor:
    return torch.randn(DIM, generator=torch.Generator().manual_seed(5), dtype=torch.float64).expand(size, DIM).clone()


def gradient(x: Tensor, step: int) -> Tensor:
    """Worker i goes to i, faster the higher its number."""
    rank = torch.arange(len(x), dtype=x.dtype)[:, None]
    return (1 + 0.1 * rank) * (x - rank - 0.3 * step)


def exchange_of(make: Groups, device: torch.device, codec: Codec, delay: int) -> Any:
    return overlapped(CodedCliqueExchange(TALK, Own(), make(), make(), device, codec), device, delay)


def descend(
    size: int, codec: Codec, delay: int, places: tuple[int, ...], device: torch.device, rank: int, make: Groups,
    engine: Engine | None = None, sick: tuple[int, ...] = (), bad: float = torch.nan,
) -> tuple[Tensor, Mixer]:  # fmt: skip
    """One worker's trajectory [steps + 1, dim]; in step 4 some are poisoned."""
    rows = [Row(start(size)[rank, a:b].to(device)) for a, b in pairwise(places)]
    mixer = Mixer(rows, RULE, exchange_of(make, device, codec, delay), delay)
    mixer.healing = Healing(3 if sick else 0)
    trajectory = [start(size)[rank]]
    for step in range(STEPS):
        x = torch.zeros(size, DIM, dtype=torch.float64)
        x[rank] = trajectory[-1]
        update = 0.1 * gradient(x, step)[rank]
        for row, part in zip(rows, update.split([len(row.flat) for row in rows]), strict=True):
            row.flat.sub_(part.to(device))
        if step == 4 and rank in sick:
            rows[0].flat[3] = bad
        with without_waiting(engine) if engine and step > 2 else nullcontext():  # tables of noise are copied once
            mixer.step(0.1)
        trajectory.append(torch.cat([row.flat for row in rows]).cpu())
    mixer.drain()
    return torch.stack(trajectory), mixer


def on_hosts(size: int, codec: Codec, delay: int, places: tuple[int, ...] = (0, DIM), **more: Any) -> list[Any]:
    def worker(group: Any) -> Any:
        return descend(size, codec, delay, places, HOST, group.rank(), groups(group), **more)

    return world(size, worker)


def formula(size: int, codec: Codec) -> Tensor:
    """[steps + 1, size, dim] at delay 0, worker by worker and part by part."""
    x, each = start(size), -(-DIM // (size * GRAIN)) * GRAIN
    anchor, m, f = x[0].clone(), torch.zeros(DIM, dtype=x.dtype), torch.zeros(DIM, dtype=x.dtype)
    path = [x.clone()]
    for step in range(STEPS):
        x = x - 0.1 * gradient(x, step)
        if TALK.sources(0, size, step):
            sent, d = x - anchor, torch.zeros_like(anchor)
            for owner in range(size):
                span = slice(min(DIM, each * owner), min(DIM, each * (owner + 1)))
                if span.start == span.stop:
                    continue
                for i in range(size):
                    if i != owner:
                        sent[i, span] = coded(codec, sent[i, span].clone(), key(i, step, 0, owner, 0))
                s = sent[owner, span] + sum(sent[i, span] for i in range(size) if i != owner)
                s = s / size + f[span]
                d[span] = coded(codec, s, key(owner, step, 0, owner, 1))
                f[span] = s - d[span]
            m = 0.6 * m + d
            way = 0.7 * (d + 0.6 * m)
            anchor, x = anchor + way, x + way - sent
        path.append(x)
    return torch.stack(path)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_the_wire_is_the_formula_on_every_worker(codec: Codec, size: int) -> None:
    found = torch.stack([path for path, _ in on_hosts(size, codec, 0)], dim=1)
    torch.testing.assert_close(found, formula(size, codec), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_the_wire_is_the_simulation(codec: Codec, delay: int) -> None:
    found = torch.stack([path for path, _ in on_hosts(3, codec, delay)], dim=1)
    expected = simulate(TALK, RULE, gradient, start(3), STEPS, 0.1, delay, codec=codec)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("delay", [0, 1])
def test_anchors_of_several_buckets_are_one_to_the_bit(delay: int) -> None:
    """The last bucket is short, so that it leaves by itself."""
    mixers = [mixer for _, mixer in on_hosts(3, Int4(), delay, (0, 300, DIM - 5, DIM))]
    anchors = [torch.cat(mixer.shown()) for mixer in mixers]
    assert all(torch.equal(anchors[0], anchor) for anchor in anchors)
    assert isinstance(mixers[0].exchange, OverlapExchange) == bool(delay)


def test_bytes_are_those_of_an_all_reduce() -> None:
    """2 (n - 1) / n of the codes, and a header to each in a round: not n - 1 times them."""
    length, size = 64 * GRAIN, 4

    def worker(group: Any) -> int:
        mixer = Mixer([Row(torch.zeros(length))], RULE, exchange_of(groups(group), HOST, Int4(), 0), 0)
        for _ in range(4):
            mixer.step()
        return mixer.exchange.traffic().bytes_sent

    codes = Int4().bytes(MessageLayout(length), torch.float32)
    rounds = sum(bool(TALK.sources(0, size, step)) for step in range(4))
    copies = copies_sent(TALK, Own(), 0, size) * 2  # a mean over both steps of the period
    assert copies == 2 * 3 / 4
    assert world(size, worker) == [rounds * (copies * codes + 3 * 24)] * size


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1e30])
@pytest.mark.parametrize("sick", [(0,), (1, 3)], ids=str)
def test_who_is_poisoned_counts_as_one_who_stood_still(sick: tuple[int, ...], bad: float, delay: int) -> None:
    """By every owner, and goes on from the anchor of all."""
    rows = on_hosts(5, Int8(), delay, sick=sick, bad=bad)
    assert [mixer.healing.healed for _, mixer in rows] == [int(rank in sick) for rank in range(5)]
    anchors = [torch.cat(mixer.shown()) for _, mixer in rows]
    assert all(torch.equal(anchors[0], anchor) for anchor in anchors)
    assert all(bool(path[-1].isfinite().all()) for path, _ in rows)


def test_a_resumed_worker_takes_the_same_steps() -> None:
    """With what its parts were rounded by, and what is in flight."""

    def worker(stop: bool, group: Any) -> Tensor:
        size, rank, make = group.size(), group.rank(), groups(group)
        row = Row(start(size)[rank].clone())
        mixer = Mixer([row], RULE, exchange_of(make, HOST, Int4(), 1), 1)
        for step in range(STEPS):
            row.flat.sub_(0.1 * gradient(row.flat.expand(size, DIM), step)[rank])
            mixer.step()
            if stop and step == 6:
                state, x = mixer.state_dict(), row.flat.clone()
                assert any(bool(f.any()) for f in state["exchange"]["owned"])
                row = Row(x)
                mixer = Mixer([row], RULE, exchange_of(make, HOST, Int4(), 1), 1)
                mixer.load_state_dict(state)
        mixer.drain()
        return row.flat

    assert all(map(torch.equal, world(3, partial(worker, True)), world(3, partial(worker, False))))


@pytest.mark.parametrize("codec", [Int4(), TopK(fraction=0.25, block=16)], ids=str)
def test_what_is_rounded_away_is_neither_lost_on_the_way_there_nor_back(codec: Codec) -> None:
    """mean of x + f, over the workers, moves by their updates alone, where the anchor moves by what was heard."""
    rule = PseudoGradient(lr=1.0, momentum=0.0)

    def worker(group: Any) -> tuple[Tensor, Tensor]:
        rank, make = group.rank(), groups(group)
        row, whole = Row(torch.zeros(DIM, dtype=torch.float64)), torch.zeros(DIM, dtype=torch.float64)
        exchange = CodedCliqueExchange(TALK, Own(), make(), make(), HOST, codec)
        mixer = Mixer([row], rule, exchange, 0)
        for step in range(STEPS):
            row.flat.add_(torch.randn(DIM, generator=torch.Generator().manual_seed(10 * step + rank)))
            mixer.step()
        exchange.coder.parts.of(rank, whole).copy_(exchange.coder.owned[0])
        return row.flat, whole

    found = world(3, worker)
    walked = sum(
        torch.randn(DIM, generator=torch.Generator().manual_seed(10 * step + rank)).double()
        for step in range(STEPS)
        for rank in range(3)
    )
    kept = sum(f for _, f in found)
    torch.testing.assert_close(sum(x for x, _ in found) / 3 + kept, walked / 3, rtol=1e-9, atol=1e-9)
    assert float(kept.abs().max()) > 1e-3, "nothing was rounded away: the test could not fail"


def test_two_workers_and_codecs_of_matrices_or_estimates_tell_each_other() -> None:
    of_all: Callable[[int], list[tuple[int, ...]]] = lambda size: [tuple(range(size))]  # noqa: E731
    for codec in (Int4(), TopK()):
        assert groups_of(TALK, 4, 0, codec, RULE) == [of_all(4)] * 2  # there and back
        assert groups_of(TALK, 2, 0, codec, RULE) == [of_all(2)]
    for codec in (LowRank(), DifferenceCompression(Int4())):
        assert groups_of(TALK, 4, 0, codec, RULE) == [of_all(4)]
    assert Ring().sources(0, 4, 0), "others than all hear each other there, which the rule refuses"
    assert not Plain().to_peers(RULE.of_differences)


# ---- devices --------------------------------------------------------------------------------------------------------


def on_devices(codec: Codec, delay: int, seed: int) -> Tensor:
    def worker(make: Make, engine: Engine) -> Tensor:
        path, mixer = descend(3, codec, delay, (0, DIM), CUDA, make.hosts.rank, make, engine)
        assert isinstance(mixer.exchange, StreamExchange) == bool(delay)
        return path

    return torch.stack(device_world(3, worker, seed), dim=1)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("codec", [Int8(block=16), Int4()], ids=str)
def test_devices_equal_the_simulation(codec: Codec, delay: int, seed: int) -> None:
    """With a delay there and back are beside the training, which waits for the mean only."""
    expected = simulate(TALK, RULE, gradient, start(3), STEPS, 0.1, delay, codec=codec)
    torch.testing.assert_close(on_devices(codec, delay, seed), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("call", ["wait_stream", "wait_event"])
def test_a_stream_that_waits_for_less_is_seen(call: str) -> None:
    seen = pytest.raises((AssertionError, RuntimeError, FloatingPointError))
    with mock.patch.object(Stream, call), seen:
        for seed in range(3):
            test_devices_equal_the_simulation(Int8(block=16), 1, seed)
