"""LAWS of rounds in which nobody waits: in time they are those of delay 1; for all ages they contract, within what they
began with. Over connections they are those of the virtual clock."""

import random
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_decentral.elastic.plan.view import View
from lightning_decentral.elastic.wire.rounds.exchange import ElasticExchange
from lightning_decentral.elastic.wire.rounds.simulation import Row
from lightning_decentral.elastic.wire.sockets.mesh import Mesh
from lightning_decentral.gossip import (
    Asynchronous,
    Auto,
    BFloat16,
    Codec,
    Complete,
    Every,
    Gossip,
    Int8,
    OnePeerExponential,
    Own,
    Plain,
    RandomMatching,
    Ring,
    Topology,
    simulate,
    simulate_asynchronous,
)
from lightning_decentral.gossip.plan.stability import blocks_without_mean, growth
from lightning_decentral.gossip.plan.weights import mixing_matrix
from lightning_decentral.gossip.wire.mixer import Mixer
from tests.elastic.wire.rounds.test_fixed_view import members

pytestmark = pytest.mark.threads
TOPOLOGIES = [Ring(), Complete(), OnePeerExponential(), Auto(workers_per_node=1), Every(2, Ring()), RandomMatching(5)]


def start(size: int, dim: int = 6) -> Tensor:
    return torch.randn(size, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def still(worker: int, x: Tensor, round: int) -> Tensor:
    return torch.zeros_like(x)


@pytest.mark.sampled
@pytest.mark.parametrize("codec", [Plain(), Int8()], ids=str)
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=repr)
def test_in_time_it_is_a_round_of_delay_1(topology: Topology, codec: Codec) -> None:
    """Messages take half a step: the virtual clock against the product with the matrix."""
    x0, targets = start(4), start(4).flip(0)
    found = simulate_asynchronous(
        topology, lambda i, x, _: x - targets[i], x0, 20, 0.1, lambda *_: 1.0, lambda *_: 0.5, codec=codec
    )
    rounds = simulate(topology, Gossip(), lambda x, _: x - targets, x0, 20, 0.1, codec=codec)
    assert torch.allclose(found, rounds, atol=1e-12 if codec == Plain() else 1e-9)


def uneven(seed: int) -> tuple[Callable[[int, int], float], Callable[[int, int], float]]:
    draw = random.Random(seed)
    paces, ways = [10 ** draw.uniform(-0.5, 0.5) for _ in range(9)], [10 ** draw.uniform(-2, 1) for _ in range(81)]
    return lambda i, _: paces[i] * draw.uniform(0.5, 1.5), lambda i, j: ways[9 * i + j] * draw.uniform(0.5, 1.5)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=repr)
def test_whatever_the_ages_it_contracts_within_what_it_began_with(topology: Topology, seed: int) -> None:
    """Steps differ by 30 times, messages take up to 30 mean steps."""
    size, (pace, transit) = 3 + seed % 5, uneven(seed)
    order = Asynchronous(damping=(0.0, 1.0)[seed % 2], behind=(4, 40)[seed // 2 % 2])
    x0 = start(size)
    path = simulate_asynchronous(topology, still, x0, 400, 0.1, pace, transit, order, every=50)
    assert (path >= x0.amin(0) - 1e-9).all()
    assert (path <= x0.amax(0) + 1e-9).all()
    apart = (path.amax(1) - path.amin(1)).amax(1)
    assert apart[-1] < 1e-3 * apart[0], apart


def test_what_a_fixed_delay_does_instead() -> None:
    """At such ages a correction from the message of then, which `delay` makes, grows beyond all bounds."""
    assert growth(blocks_without_mean([mixing_matrix(Complete(), 4, 0)]), 10, 1.0) > 1.05


def test_a_slow_worker_counts_less_and_holds_up_nobody() -> None:
    size, x0 = 4, torch.eye(4, dtype=torch.float64)
    path = simulate_asynchronous(
        Ring(), still, x0, 400, 0.1, lambda i, _: 10.0 if i == 2 else 1.0, lambda *_: 0.1, every=400
    )
    shares = path[-1, 0]  # of each one's first value in what all have in the end
    assert torch.allclose(path[-1], shares.expand(size, size), atol=1e-6)
    assert shares.sum() == pytest.approx(1)
    assert shares[2] < 0.6 * min(shares[i] for i in (0, 1, 3)), shares


def rounds_taken(pace: Callable[[int, int], float], order: Asynchronous) -> list[list[int]]:
    taken: list[list[int]] = [[] for _ in range(3)]

    def gradient(worker: int, x: Tensor, round: int) -> Tensor:
        taken[worker].append(round)
        return x

    simulate_asynchronous(Ring(), gradient, start(3), 50, 0.1, pace, lambda *_: 0.1, order)
    return taken


def test_who_is_late_leaves_rounds_out() -> None:
    taken = rounds_taken(lambda i, _: 5.0 if i == 1 else 1.0, Asynchronous(behind=2))
    assert taken[0] == taken[2] == [*range(len(taken[0]))]
    late = taken[1]
    assert len(late) in (9, 10)
    assert all(b - a == 1 or b - a > 3 for a, b in pairwise(late))
    assert late[-1] > 40


def test_a_step_takes_time() -> None:
    with pytest.raises(ValueError, match="worker 0's step of round 0 takes 0 seconds: give more than 0"):
        simulate_asynchronous(Ring(), still, start(3), 5, 0.1, lambda *_: 0)


# ---- over connections -----------------------------------------------------------------------------------------------


def made(workers: list[Any], view: View, topology: Topology, codec: Codec | None = None) -> list[Mixer]:
    found = []
    for place, worker in enumerate(workers):
        exchange = ElasticExchange(topology, Own(), worker, codec or Plain(), order=Asynchronous())
        exchange.enter(view, 0)
        mixer = Mixer([], Gossip(), exchange, 1)
        mixer.extend([Row(row) for row in start(len(workers), 40)[place].split([5, 34, 1])])
        found.append(mixer)
    return found


def flat(mixer: Mixer) -> Tensor:
    return torch.cat([bucket.flat for bucket in mixer.buckets])


def settled(workers: list[Any], mixers: list[Mixer], round: int, peers: int) -> None:
    """Until all have all messages of a round, and nothing is leaving."""
    exchange: Any = mixers[0].exchange
    messages = peers * sum(map(len, exchange._since[-1][1]._sizes.values()))
    end = time.monotonic() + 60
    while not all(
        sum(slot.round == round for slot in [*worker.mesh._inbox]) == messages
        and all(line.idle for line in [*worker.mesh._lines.values()])
        for worker in workers
    ):
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.mark.parametrize("codec", [Plain(), BFloat16(), Int8()], ids=str)
def test_in_time_over_connections_it_is_the_simulation(codec: Codec) -> None:
    with members(4) as (workers, view):
        mixers = made(workers, view, Ring(), codec)
        for round in range(6):
            for worker, mixer in zip(workers, mixers, strict=True):
                if round:  # in the first one nothing lands
                    come_before(worker.mesh, round)
                for bucket in mixer.buckets:
                    bucket.flat.sub_(bucket.flat.clone(), alpha=0.1)
                mixer.step()
            settled(workers, mixers, round, 2)
        found = torch.stack([flat(mixer) for mixer in mixers])
        assert [mixer.exchange.age for mixer in mixers] == [0.0] * 4  # type: ignore[attr-defined]
    x0 = start(4, 40)
    parts = [
        simulate_asynchronous(Ring(), lambda i, x, _: x, part, 6, 0.1, lambda *_: 1.0, lambda *_: 0.5, codec=codec)[-1]
        for part in x0.split([5, 34, 1], dim=1)
    ]
    same = 5 if codec == Int8() else 40  # what it rounds by is drawn by the place of a bucket
    assert torch.equal(found[:, :same], torch.cat(parts, dim=1)[:, :same])


def come_before(mesh: Mesh, round: int) -> None:
    """Only what left before this round has come, whenever the rest of it does."""
    newest = Mesh.newest

    def earlier(*args: Any) -> Any:
        with mesh.changed:  # else the rest might come between the two looks, be taken, and never be there
            late = {slot: mesh._inbox.pop(slot) for slot in [*mesh._inbox] if slot.round >= round}
            found = newest(mesh, *args)
            mesh._inbox.update(late)
        return found

    mesh.newest = earlier  # type: ignore[method-assign]


def test_nobody_waits_for_one_who_says_nothing() -> None:
    with members(3) as (workers, view):
        mixers = made(workers, view, Complete())
        end, inbox, others = time.monotonic() + 60, workers[2].mesh._inbox, [w.name for w in workers[:2]]
        while True:
            for mixer in mixers[:2]:
                mixer.step()
            close = torch.allclose(flat(mixers[0]), flat(mixers[1]), atol=1e-3)
            kept = [{slot.round for slot in [*inbox] if slot.sender == name} for name in others]
            assert all(len(rounds) <= 2 for rounds in kept)
            if close and all(kept):
                break
            assert time.monotonic() < end


def test_one_that_trains_other_parameters_by_now_is_not_heard() -> None:
    with members(2) as (workers, view):
        mixers = made(workers, view, Ring())
        mixers[1].extend([Row(torch.ones(3, dtype=torch.float64))])
        before = flat(mixers[0])
        end = time.monotonic() + 60
        while any(max(worker.mesh.begun.values(), default=0) < 3 for worker in workers):
            for mixer in mixers:
                mixer.step()
            assert time.monotonic() < end
        assert torch.equal(flat(mixers[0]), before)


def test_a_message_leaves_when_the_one_before_it_has() -> None:
    with members(2) as (workers, view):
        mixers = made(workers, view, Ring())
        went = threading.Event()
        line_of = workers[0].mesh._lines
        mixers[0].step()
        settled(workers[1:], mixers, 0, 1)
        sends = next(iter(line_of.values()))._send
        next(iter(line_of.values()))._send = partial(_when, went, sends)
        sent = [mixers[0].exchange.traffic().bytes_sent]
        for round in range(1, 4):
            mixers[0].round = round
            mixers[0].step()
            sent.append(mixers[0].exchange.traffic().bytes_sent)
        went.set()
        assert sent[1] == sent[2] == sent[3] > sent[0]
        settled(workers[1:], mixers, 1, 1)
        mixers[1].step()
        mixers[1].step()
        assert not torch.equal(flat(mixers[1]), start(2, 40)[1])


def _when(went: threading.Event, send: Callable[[Any], None], sent: Any) -> None:
    went.wait(20)
    send(sent)
