"""LAW: rounds over a view that stays are those of a fixed world, bit by bit; who isn't heard whole isn't heard."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_decentral.elastic.plan.view import View
from lightning_decentral.elastic.wire.rounds.exchange import ElasticExchange
from lightning_decentral.elastic.wire.sockets.mesh import Mesh
from lightning_decentral.gossip import (
    Auto,
    Codec,
    Every,
    Gossip,
    LearningRatePower,
    MetropolisHastings,
    Outer,
    OuterNesterov,
    PeriodicAverage,
    Plain,
    QuasiGlobalMomentum,
    Ring,
    Star,
    Topology,
)
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.gossip.wire.peer import PeerExchange
from tests.elastic.wire.lobbies import losses
from tests.gossip.codecs import usable
from tests.gossip.rules import Rule
from tests.gossip.wire.test_exchange import CPU, Row, run, start

pytestmark = pytest.mark.threads

PLANS: list[tuple[Rule, Topology, int, int]] = [
    (Gossip(), Auto(), 4, 1),
    (Gossip(rate=0.4), Ring(), 3, 2),
    (Gossip(rate=LearningRatePower()), Star(), 4, 0),
    (Outer(), Every(2, Auto()), 3, 1),
    (QuasiGlobalMomentum(momentum=0.5, rate=0.3), Ring(), 3, 1),
    (OuterNesterov(), PeriodicAverage(3, Ring()), 3, 0),
]
STATELESS = [Plain(), *(codec for codec in usable() if not codec.remembers)]
CASES = [(codec, *PLANS[n % len(PLANS)]) for n, codec in enumerate(STATELESS)]
CASES += [(Plain(), *plan) for plan in PLANS[1:]]


def expecting() -> SimpleNamespace:
    """Client of a lobby by which all messages may still come."""
    return SimpleNamespace(state=SimpleNamespace(expects=lambda *_: True))


@contextmanager
def members(size: int) -> Iterator[tuple[list[Any], View]]:
    """Workers of one view, without a lobby: all are expected for ever."""
    meshes = [Mesh("127.0.0.1", "", {}, threading.Condition()) for _ in range(size)]
    for place, mesh in enumerate(meshes):
        mesh.name = f"{place}@{mesh.place}"
    try:
        view = View(1, tuple(mesh.name for mesh in meshes), 0, (), meshes[0].name, len(meshes))
        yield [SimpleNamespace(name=mesh.name, mesh=mesh, lobby_client=expecting()) for mesh in meshes], view
    finally:
        for mesh in meshes:
            mesh.close()


def entered(worker: Any, view: View, topology: Topology, codec: Codec) -> ElasticExchange:
    exchange = ElasticExchange(topology, MetropolisHastings(), worker, codec)
    exchange.enter(view, 0)
    return exchange


@pytest.mark.sampled
@pytest.mark.parametrize(("codec", "rule", "topology", "size", "delay"), CASES, ids=str)
def test_it_is_a_fixed_world(codec: Codec, rule: Rule, topology: Topology, size: int, delay: int) -> None:
    x0 = start(size, 40)

    def plain(transport: Any, device: Any) -> Any:
        return PeerExchange(topology, MetropolisHastings(), transport, device, codec)

    with members(size) as (workers, view):
        lost = [losses(worker.mesh) for worker in workers]
        exchanges = [entered(worker, view, topology, codec) for worker in workers]
        found = run(CPU, x0.clone(), delay, rule, lambda transport, device: exchanges[transport.rank])
    assert torch.equal(found, run(CPU, x0.clone(), delay, rule, plain))
    assert not torch.equal(found[-1], x0)
    assert not any(lost)
    assert {exchange.coder.bytes for exchange in exchanges} == {sum(_bytes(codec, n) for n in (5, 34, 1))}


def _bytes(codec: Codec, length: int) -> int:
    return codec.bytes(length, torch.float64)


@pytest.mark.parametrize("codec", STATELESS, ids=str)
@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_message_that_breaks_off_is_the_own_one(codec: Codec, kept: int) -> None:
    """Of two workers one ends when so many tensors of its round have left."""
    with members(2) as (workers, view):
        mixers = []
        for place, worker in enumerate(workers):
            exchange = entered(worker, view, Ring(), codec)
            mixers.append(Mixer([], Gossip(), exchange, delay=0))
            mixers[-1].extend([Row(start(2, 40)[place] * 10**place)])
        ended = threading.Event()
        workers[0].lobby_client.state.expects = lambda *_: not ended.is_set()
        workers[1].mesh.send = partial(_so_many, workers[1].mesh.send, kept, ended)
        thread = threading.Thread(target=mixers[1].step, daemon=True)
        thread.start()
        before, lost = mixers[0].buckets[0].flat.clone(), losses(workers[0].mesh)
        mixers[0].step()
        thread.join(10)
        whole = kept > len(codec.parts(40, torch.float64))
        assert torch.equal(before, mixers[0].buckets[0].flat) is not whole
        assert bool(lost) is not whole


def _so_many(send: Any, kept: int, ended: Any, to: str, place: str, key: int, round: int, slot: int, raw: Any) -> Any:
    if slot < kept:
        return send(to, place, key, round, slot, raw)
    ended.set()
    return SimpleNamespace(wait=bool)
