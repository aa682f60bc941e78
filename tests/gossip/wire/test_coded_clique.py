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
    BaseGraph,
    Codec,
    Combine,
    Complete,
    DifferenceCompression,
    Every,
    Float16,
    Float32,
    Int2,
    Int4,
    Int8,
    LinearRate,
    Own,
    PeriodicAverage,
    Plain,
    PseudoGradient,
    Ring,
    TopK,
    Topology,
    simulate,
)
from lightning_decentral.gossip.compute.combine.combine import MessageForm
from lightning_decentral.gossip.compute.error_feedback import CodedMean
from lightning_decentral.gossip.compute.healing import Healing
from lightning_decentral.gossip.compute.link import cliques_of
from lightning_decentral.gossip.plan.planned_traffic import Cliques, copies_sent
from lightning_decentral.gossip.plan.weights import mixing_matrix
from lightning_decentral.gossip.wire.coded_clique import CodedCliqueExchange
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.gossip.wire.overlap import OverlapExchange, StreamExchange, overlapped
from lightning_decentral.shared.compute.buckets import Pool
from lightning_decentral.shared.compute.codec.blocks import key
from lightning_decentral.shared.compute.codec.coded_parts import GRAIN, CodedParts
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


class Doubled(PseudoGradient):
    """A rule of differences that sends two numbers for each parameter."""

    @property
    def form(self) -> MessageForm:
        return MessageForm(copies=2, differences=True)


def start(size: int) -> Tensor:
    return torch.randn(DIM, generator=torch.Generator().manual_seed(5), dtype=torch.float64).expand(size, DIM).clone()


def gradient(x: Tensor, step: int) -> Tensor:
    """Worker i goes to i, faster the higher its number."""
    rank = torch.arange(len(x), dtype=x.dtype)[:, None]
    return (1 + 0.1 * rank) * (x - rank - 0.3 * step)


def exchange_of(make: Groups, device: torch.device, codec: Codec, delay: int) -> Any:
    return overlapped(CodedCliqueExchange(TALK, Own(), make(), device, codec, back=make()), device, delay)


def descend(
    size: int, codec: Codec, delay: int, places: tuple[int, ...], device: torch.device, rank: int, make: Groups,
    engine: Engine | None = None, sick: tuple[int, ...] = (), bad: float = torch.nan, rule: PseudoGradient = RULE,
) -> tuple[Tensor, Mixer]:  # fmt: skip
    """One worker's trajectory [steps + 1, dim]; in step 4 some are poisoned."""
    rows = [Row(start(size)[rank, a:b].to(device)) for a, b in pairwise(places)]
    mixer = Mixer(rows, rule, exchange_of(make, device, codec, delay), delay)
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
        # Tables of noise are copied once, and who is healed waits.
        with without_waiting(engine) if engine and step > 2 and not sick else nullcontext():
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
                    sent[i, span] = coded(codec, sent[i, span].clone(), key(i, step, 0, owner, 0))
                s = sent[:, span].sum(0) / size + f[span]
                d[span] = coded(codec, s, key(owner, step, 0, owner, 1))
                f[span] = s - d[span]
            m = 0.6 * m + d
            way = 0.7 * (d + 0.6 * m)
            anchor, x = anchor + way, x + way - sent
        path.append(x)
    return torch.stack(path)


@pytest.mark.sampled
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_the_wire_is_the_formula_on_every_worker(codec: Codec, size: int) -> None:
    found = torch.stack([path for path, _ in on_hosts(size, codec, 0)], dim=1)
    torch.testing.assert_close(found, formula(size, codec), rtol=1e-9, atol=1e-9)


@pytest.mark.sampled
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

    codes = Int4().bytes(length, torch.float32)
    rounds = sum(bool(TALK.sources(0, size, step)) for step in range(4))
    copies = copies_sent(TALK, Own(), 0, size) * 2  # a mean over both steps of the period
    assert copies == 2 * 3 / 4
    assert world(size, worker) == [rounds * (copies * codes + 3 * 24)] * size


@pytest.mark.sampled
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
        exchange = CodedCliqueExchange(TALK, Own(), make(), HOST, codec, back=make())
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


def test_two_workers_and_codecs_of_estimates_tell_each_other() -> None:
    of_all: Callable[[int], list[tuple[int, ...]]] = lambda size: [tuple(range(size))]  # noqa: E731
    for codec in (Int4(), TopK()):
        assert groups_of(TALK, 4, 0, codec, RULE) == [of_all(4)] * 2  # there and back
        assert groups_of(TALK, 2, 0, codec, RULE) == [of_all(2)]
    assert groups_of(TALK, 4, 0, DifferenceCompression(Int4()), RULE) == [of_all(4)]
    assert Ring().sources(0, 4, 0), "others than all hear each other there, which the rule refuses"
    assert cliques_of(Plain(), RULE, TALK, Own(), 4) is Cliques.RING


@pytest.mark.parametrize(
    ("topology", "rule"),
    [(BaseGraph(max_degree=2), RULE), (PeriodicAverage(4, Ring()), RULE), (TALK, Doubled())],
    ids=lambda part: type(part).__name__,
)
def test_who_doesnt_hear_all_or_sends_more_tells_peers(topology: Topology, rule: Combine) -> None:
    assert cliques_of(Int8(), rule, topology, Own(), 6) is Cliques.PEERS


def test_a_simulation_of_groups_is_not_that_of_all() -> None:
    """Who hears two others goes where these three went."""
    topology, rule = BaseGraph(max_degree=2), PseudoGradient(lr=1.0, momentum=0.0)
    ways = torch.arange(6.0, dtype=torch.float64)[:, None].expand(6, DIM)
    path = simulate(topology, rule, lambda x, step: -ways, torch.zeros(6, DIM).double(), 1, 1.0, 0, codec=Float32())
    expected = torch.from_numpy(mixing_matrix(topology, 6, 0)) @ ways
    torch.testing.assert_close(path[-1], expected, rtol=1e-6, atol=1e-6)


def test_complex_parameters_are_pairs_of_real_ones() -> None:
    x0 = torch.randn(1, DIM, dtype=torch.complex128, generator=torch.Generator().manual_seed(0)).expand(3, DIM).clone()

    def worker(group: Any) -> Tensor:
        row = Row(x0[0].clone())
        mixer = Mixer([row], RULE, exchange_of(groups(group), HOST, Int8(), 0), 0)
        for _ in range(4):
            row.flat.sub_(0.1 * (row.flat - group.rank()))
            mixer.step(0.1)
        return row.flat

    ranks = torch.arange(3)[:, None]
    expected = simulate(TALK, RULE, lambda x, step: x - ranks, x0, 4, 0.1, 0, codec=Int8())
    torch.testing.assert_close(torch.stack(world(3, worker)), expected[-1], rtol=1e-9, atol=1e-9)


def test_half_precision_doesnt_overflow_in_the_sum() -> None:
    def worker(group: Any) -> Tensor:
        row = Row(torch.zeros(DIM, dtype=torch.float16))
        mixer = Mixer([row], PseudoGradient(lr=1.0, momentum=0.0), exchange_of(groups(group), HOST, Float16(), 0), 0)
        for step in range(2):
            row.flat.add_(20000.0 * (step == 0))
            mixer.step()
        return row.flat

    for x in world(4, worker):  # four times 20000 is beyond what float16 holds
        torch.testing.assert_close(x, torch.full_like(x, 20000.0), rtol=1e-3, atol=0)


def test_a_landing_that_the_others_must_share_says_so() -> None:
    """Not overlapped: a worker that has no batch left is told how many steps the others need of it."""

    def worker(group: Any) -> list[int]:
        make, wanted = groups(group), []
        exchange = CodedCliqueExchange(TALK, Own(), make(), HOST, Int8(), back=make())
        mixer = Mixer([Row(torch.zeros(DIM))], RULE, exchange, 1)
        for _ in range(6):
            mixer.step()
            wanted.append(mixer.wanted)
        mixer.drain()
        return wanted

    talks = [step for step in range(6) if TALK.sources(0, 3, step)]
    for wanted in world(3, worker):
        assert [wanted[step + 1] for step in talks if step + 1 < 6] == [step + 2 for step in talks if step + 1 < 6]


def test_a_checkpoint_from_before_means_were_coded_goes_on() -> None:
    coded_mean = CodedMean(CodedParts(Int4(), 0, 3, Pool()))
    coded_mean.admit([torch.zeros(DIM)])
    coded_mean.load_state_dict({"codec": repr(Int4()), "estimates": [{}]})
    assert not coded_mean.owned[0].any()


def test_the_error_is_that_of_all_parts() -> None:
    """The own one, too: whole, it would pile up where of the others a few elements are sent."""
    x = torch.randn(DIM, generator=torch.Generator().manual_seed(1))
    sent, lost = x.clone(), CodedMean(CodedParts(Int4(), 1, 3, Pool()))
    lost.admit([x])
    lost.encode(sent, 0, 0)
    assert lost.lost.value() == pytest.approx(float((x - sent).norm() / x.norm()), rel=1e-4)
    assert not torch.equal(*(tensor[slice(*lost.parts.spans(DIM)[1])] for tensor in (sent, x)))


OPTIMUM_STEPS, NOISE = 8 * 60, 0.02


@pytest.mark.sampled
@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize(("lr", "momentum"), [(1.0, 0.0), (0.7, 0.5)])
@pytest.mark.parametrize("codec", [Int8(), Int4(), Int2(), TopK(fraction=1 / 16)], ids=str)
def test_an_optimum_that_all_share_is_approached(codec: Codec, lr: float, momentum: float, size: int) -> None:
    """To where noise of gradients leaves messages as they are, as soon; of sparse codes an owner's own part, too."""
    d = 1024
    target = torch.randn(d, generator=torch.Generator().manual_seed(2)).double() * torch.logspace(0, -2, d).double()
    target = target[torch.randperm(d, generator=torch.Generator().manual_seed(3))]

    def distance(codec: Codec | None) -> float:
        generator = torch.Generator().manual_seed(1)

        def noisy(x: Tensor, step: int) -> Tensor:
            return x - target + NOISE * torch.randn(x.shape, generator=generator, dtype=x.dtype)

        plan, start = Every(8, Complete()), torch.zeros(size, d, dtype=torch.float64)
        rule = PseudoGradient(lr=lr, momentum=momentum)
        path = simulate(plan, rule, noisy, start, OPTIMUM_STEPS, 0.02, 0, codec=codec, every=OPTIMUM_STEPS)
        return float((path[-1].mean(0) - target).norm() / target.norm())

    assert distance(codec) < max(0.01, 2 * distance(None))


# ---- devices --------------------------------------------------------------------------------------------------------


def on_devices(codec: Codec, delay: int, seed: int) -> Tensor:
    def worker(make: Make, engine: Engine) -> Tensor:
        path, mixer = descend(3, codec, delay, (0, DIM), CUDA, make.hosts.rank, make, engine)
        assert isinstance(mixer.exchange, StreamExchange) == bool(delay)
        return path

    return torch.stack(device_world(3, worker, seed), dim=1)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("codec", [Int8(block=16), Int4()], ids=str)
def test_devices_equal_the_simulation(codec: Codec, delay: int, seed: int) -> None:
    """With a delay there and back are beside the training, which waits for the mean only."""
    expected = simulate(TALK, RULE, gradient, start(3), STEPS, 0.1, delay, codec=codec)
    torch.testing.assert_close(on_devices(codec, delay, seed), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.sampled
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(
    "rule", [RULE, PseudoGradient(lr=0.7, momentum=LinearRate(first=0.1, last=0.6, rounds=8))], ids=["fixed", "rising"]
)
def test_anchors_of_devices_stay_one_where_a_worker_is_healed_late(rule: PseudoGradient, delay: int) -> None:
    """The host hears of it rounds later, when other poisoned messages have left."""

    def worker(make: Make, engine: Engine) -> tuple[Tensor, int]:
        rank = make.hosts.rank
        _, mixer = descend(4, Int8(), delay, (0, DIM), CUDA, rank, make, engine, sick=(1,), rule=rule)
        return torch.cat([x.cpu() for x in mixer.shown()]), mixer.healing.healed

    found = device_world(4, worker, 0)
    assert [healed for _, healed in found] == [0, 1, 0, 0]
    assert all(torch.equal(found[0][0], anchor) for anchor, _ in found)


@pytest.mark.parametrize("call", ["wait_stream", "wait_event"])
def test_a_stream_that_waits_for_less_is_seen(call: str) -> None:
    seen = pytest.raises((AssertionError, RuntimeError, FloatingPointError))
    with mock.patch.object(Stream, call), seen:
        for seed in range(3):
            test_devices_equal_the_simulation(Int8(block=16), 1, seed)
