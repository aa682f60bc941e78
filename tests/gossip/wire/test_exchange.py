"""LAW: a run on the wire equals the simulation step for step, for every topology, rule and delay."""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_decentral.gossip import (
    BaseGraph,
    Complete,
    Every,
    Gossip,
    MetropolisHastings,
    OnePeerExponential,
    Own,
    Ring,
    Stream,
    Topology,
    Weights,
    simulate,
)
from lightning_decentral.gossip.compute.mixing import LAG
from lightning_decentral.gossip.plan.planned_traffic import partitions
from lightning_decentral.gossip.plan.weights import mixing_matrix
from lightning_decentral.gossip.wire.assembly import CliqueExchange
from lightning_decentral.gossip.wire.consensus import mixer_of
from lightning_decentral.gossip.wire.exchange import Exchange, Traffic
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.gossip.wire.overlap import overlapped
from lightning_decentral.gossip.wire.peer import PeerExchange
from lightning_decentral.shared.wire.transport import Transport
from tests.backends import Backend, every_backend, everywhere
from tests.gossip.rules import Rule, covering
from tests.gossip.topologies import every_topology

pytestmark = pytest.mark.threads

CPU = Backend("cpu", "cpu")
STEPS = 9
DIM = 17


@dataclass
class Row:
    flat: Tensor

    def adopt(self) -> None:
        """Nothing else holds it."""


def gradient(x: Tensor, step: int) -> Tensor:
    """Of a quadratic with another minimum and curvature for each worker, and a term that depends on the step."""
    rank = torch.arange(x.shape[0], dtype=x.dtype).unsqueeze(1)
    return (1 + 0.1 * rank) * (x - rank - 0.3 * step)


def exchange_of(
    transport: Transport, device: torch.device, topology: Topology, weights: Weights | None = None, delay: int = 0
) -> Exchange:
    return overlapped(PeerExchange(topology, weights or Own(), transport, device), device, delay)


def clique_exchange_of(transport: Transport, device: torch.device, topology: Topology, delay: int = 0) -> Exchange:
    cliques = partitions(topology, Own(), transport.size)
    assert cliques is not None
    exchange = CliqueExchange(cliques, {tuple(range(transport.size)): transport}, transport.rank, device)
    return overlapped(exchange, device, delay)


def descend(backend: Backend, x0: Tensor, delay: int, rule: Rule, build: Any, transport: Transport) -> Tensor:
    """One worker's trajectory [steps + 1, dim], with three buckets where the simulation has one."""
    rank, device, dim = transport.rank, backend.device(transport.rank), x0.shape[1]
    places = (0, 5, dim - 1, dim)  # the last bucket is short, so that rounds overlap in it
    buckets = [Row(x0[rank, a:b].to(device)) for a, b in pairwise(places)]
    mixer = mixer_of(rule, build(transport, device), delay, lambda: transport)
    mixer.extend(buckets)
    trajectory = [x0[rank].clone()]
    for step in range(STEPS):
        rows = torch.zeros_like(x0)
        rows[rank] = trajectory[-1]
        update = 0.1 * gradient(rows, step)[rank].to(device)
        for bucket, part in zip(buckets, update.split([len(b.flat) for b in buckets]), strict=True):
            bucket.flat.sub_(part)
        mixer.step(0.1)
        trajectory.append(torch.cat([b.flat for b in buckets]).cpu())
    mixer.drain()
    return torch.stack(trajectory)


def run(backend: Backend, x0: Tensor, delay: int, rule: Rule, build: Any) -> Tensor:
    """Every worker on a wire of its own, in the simulation's terms: [steps + 1, size, dim]."""
    return torch.stack(backend.world(len(x0), partial(descend, backend, x0, delay, rule, build)), dim=1)


def run_fragments(backend: Backend, x0: Tensor, delay: int, rule: Rule, topology: Topology, build: Any) -> Tensor:
    """The same for each fragment of a model, as gradients of one column don't depend on another."""
    parts = zip(topology.fragments, x0.chunk(len(topology.fragments), dim=1), strict=True)
    size = len(x0)
    return torch.cat(
        [run(backend, x, delay, rule.placed(part, size), partial(build, topology=part)) for part, x in parts], dim=2
    )


def start(size: int, dim: int = 5) -> Tensor:
    return torch.randn(size, dim, generator=torch.Generator().manual_seed(size), dtype=torch.float64)


# Every size with one delay, the other delays with one size: what differs between delays is no matter of the size.
CASES = [*((*case, 1) for case in every_topology()), *((*c, (0, 3)[c[1] % 2]) for c in every_topology(range(4, 6)))]


# What a schedule is no device knows; orders of messages, of rounds and of streams it does.
SCHEDULES = (Ring, OnePeerExponential, BaseGraph, Stream)


@pytest.mark.sampled
@everywhere("topology,size,delay", CASES, lambda topology, size, _: size == 4 and type(topology) in SCHEDULES)
def test_wire_equals_simulation(backend: Backend, topology: Topology, size: int, delay: int) -> None:
    x0, rule = start(size, DIM), Gossip(rate=0.4 if delay > 1 else 1.0)
    expected = simulate(topology, rule, gradient, x0, STEPS, 0.1, delay)
    measured = run_fragments(backend, x0, delay, rule, topology, partial(exchange_of, delay=delay))
    torch.testing.assert_close(measured, expected, rtol=1e-12, atol=1e-12)


RULES = covering((0, 1, 3))
FIRST = {case[0]: case for case in reversed(RULES)}


@pytest.mark.sampled
@everywhere("rule,topology,size,delay", RULES, lambda *case: FIRST[case[0]] == case)
def test_wire_equals_simulation_for_every_rule(
    backend: Backend, rule: Rule, topology: Topology, size: int, delay: int
) -> None:
    x0 = start(size, DIM)
    expected = simulate(topology, rule, gradient, x0, STEPS, 0.1, delay)
    build = partial(exchange_of, weights=rule.weights, delay=delay)
    measured = run_fragments(backend, x0, delay, rule, topology, build)
    torch.testing.assert_close(measured, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_simulation_is_the_written_recursion(delay: int) -> None:
    """Against the recursion in plain numpy terms: x(t+1) = x(t) + u(t) + rate (W - I) x_sent."""
    size, rate, topology = 5, 0.5, Ring()
    x0 = start(size, DIM)
    x, sent, expected = x0.clone(), [], [x0]
    for step in range(STEPS):
        x = x - 0.1 * gradient(x, step)
        matrix = torch.from_numpy(mixing_matrix(topology, size, step))
        if delay == 0:
            x = x + rate * (matrix @ x - x)
        else:
            if step >= delay:
                x = x + rate * (matrix @ sent[step - delay] - sent[step - delay])
            sent.append(x)
        expected.append(x)
    measured = simulate(topology, Gossip(rate=rate), gradient, x0, STEPS, 0.1, delay)
    torch.testing.assert_close(measured, torch.stack(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.sampled
@every_backend
@pytest.mark.parametrize("topology", [Complete(), Every(2, Complete())], ids=str)
@pytest.mark.parametrize("delay", [0, 1])
def test_cliques_equal_peers_and_simulation(backend: Backend, topology: Topology, delay: int) -> None:
    x0 = start(5, DIM)
    expected = simulate(topology, Gossip(), gradient, x0, STEPS, 0.1, delay)
    measured = run(backend, x0, delay, Gossip(), partial(clique_exchange_of, topology=topology, delay=delay))
    torch.testing.assert_close(measured, expected, rtol=1e-12, atol=1e-12)


def test_weights_are_composed_on_the_wire_too() -> None:
    x0, weights = start(4, DIM), Lazy()
    expected = simulate(Ring(), Gossip(), gradient, x0, STEPS, 0.1, weights=weights)
    measured = run(CPU, x0, 1, Gossip(), partial(exchange_of, topology=Ring(), weights=weights))
    torch.testing.assert_close(measured, expected, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(expected, simulate(Ring(), Gossip(), gradient, x0, STEPS, 0.1))


class Lazy(Weights):
    """(W + I) / 2 of the Metropolis-Hastings weights W."""

    def row(self, topology: Topology, rank: int, size: int, step: int) -> dict[int, float]:
        row = {j: w / 2 for j, w in MetropolisHastings().row(topology, rank, size, step).items()}
        return {**row, rank: row[rank] + 0.5}


@pytest.mark.parametrize(("topology", "size"), every_topology(), ids=str)
def test_the_mean_is_preserved(topology: Topology, size: int) -> None:
    x0 = start(size, DIM)
    trajectory = simulate(topology, Gossip(), lambda x, _: torch.zeros_like(x), x0, STEPS, 0.1)
    torch.testing.assert_close(trajectory.mean(1), x0.mean(0).expand(STEPS + 1, DIM), rtol=1e-12, atol=1e-12)


def test_noise_identity_tells_overlapped_from_blocking() -> None:
    """Pure noise, Ring: Xi^2(AWC) = Xi^2(ATC) + (1 - 1/n) eta^2 sigma^2 in the steady state."""
    size, dim, steps, eta = 6, 4000, 60, 0.1
    noise = torch.randn(steps, size, dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x0 = torch.zeros(size, dim, dtype=torch.float64)
    spread = []
    for delay in (0, 1):
        last = simulate(Ring(), Gossip(), lambda x, t: noise[t], x0, steps, eta, delay)[-1]
        spread.append(float((last - last.mean(0)).square().sum(1).mean() / dim))
    assert spread[1] - spread[0] == pytest.approx((1 - 1 / size) * eta**2, rel=0.05)


def count(delay: int, transport: Transport) -> Traffic:
    exchange = exchange_of(transport, torch.device("cpu"), Ring(), delay=delay)
    mixer = Mixer([Row(torch.zeros(DIM, dtype=torch.float64))], Gossip(), exchange, delay)
    for _ in range(STEPS):
        mixer.step()
    mixer.drain()
    return mixer.traffic()


@pytest.mark.parametrize("delay", [0, 1])
def test_bytes_are_counted_by_the_formula(delay: int) -> None:
    """Ring: two neighbours hear DIM float64 and a header of three numbers in every round."""
    for traffic in CPU.world(4, partial(count, delay)):
        assert (traffic.bytes_sent, traffic.rounds) == (STEPS * 2 * (DIM * 8 + 24), STEPS)
        assert traffic.in_flight_seconds >= traffic.wait_seconds > 0


def out_of_step(transport: Transport) -> None:
    mixer = Mixer([Row(torch.zeros(DIM))], Gossip(), exchange_of(transport, torch.device("cpu"), Ring()), 0)
    mixer.round += transport.rank == 2
    mixer.step()


def test_a_worker_in_another_round_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"is in round \d but received round \d from worker \d|lost neighbour"):
        CPU.world(3, out_of_step, seconds=5)


def poisoned(backend: Backend, bad: float, build: Any, transport: Transport) -> tuple[Tensor, int, str]:
    """Worker 1 sends NaN: (parameters, messages refused, error) of each worker once that is told."""
    device = backend.device(transport.rank)
    exchange = build(transport, device)
    row = Row(torch.full((DIM,), float(transport.rank), device=device))
    mixer = Mixer([row], Gossip(), exchange, 0)
    if transport.rank == 1:
        row.flat[3] = bad
    try:
        for _ in range(1 + LAG * (device.type == "cuda")):  # a device tells later
            mixer.step()
    except FloatingPointError as error:
        return row.flat.cpu(), exchange.traffic().refused, str(error)
    return row.flat.cpu(), exchange.traffic().refused, ""


@every_backend
@pytest.mark.parametrize("build", [exchange_of, clique_exchange_of])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_message_that_is_not_finite_never_enters_a_healthy_worker(backend: Backend, bad: float, build: Any) -> None:
    """Its weight falls to the receiver (peers) or it is left out (cliques); the sender's own error names it."""
    size = min(3, backend.largest_world())
    first, second, *_ = backend.world(size, partial(poisoned, backend, bad, partial(build, topology=Complete())))
    assert bool(torch.isfinite(first[0]).all())
    assert first[1] >= 1
    assert first[2] == ""
    assert second[2].startswith("worker 1: its parameters hold NaN or infinity in round 0")


@every_backend
@pytest.mark.filterwarnings("ignore:worker . refused")
@pytest.mark.parametrize(("build", "size"), [(exchange_of, 2), (exchange_of, 3), (clique_exchange_of, 3)])
@pytest.mark.parametrize("bad", [1e30, -1e30])
def test_an_absurd_message_never_enters_a_healthy_worker(backend: Backend, bad: float, build: Any, size: int) -> None:
    """Peers mix without it, a clique keeps its own; the sender's own error says what it is."""
    size = min(size, backend.largest_world())
    first, second, *others = backend.world(size, partial(poisoned, backend, bad, partial(build, topology=Complete())))
    for x, refused, error in (first, *others):
        assert float(x.abs().max()) <= size
        assert (refused, error) == (1, "")
    assert second[2].startswith("worker 1: its parameters hold numbers over 1e+09 times its neighbours' in round 0")


def landed(bad: float, delay: int, build: Any, transport: Transport) -> Tensor:
    """Worker 1 is absurd in round 1 and stops by itself where it learns that; parameters of the others after it."""
    exchange = build(transport, torch.device("cpu"), delay=delay)
    row = Row(torch.full((DIM,), float(transport.rank)))
    mixer = Mixer([row], Gossip(rate=0.4), exchange, delay)
    mixer.step()
    if transport.rank == 1:
        row.flat[3] = bad
    mixer.step()
    for _ in range(delay - 1):
        mixer.step()
    mixer.drain()
    return row.flat


@pytest.mark.filterwarnings("ignore:worker . refused")
@pytest.mark.parametrize("build", [exchange_of, clique_exchange_of])
@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("bad", [1e30, float("nan")])
def test_whatever_the_delay_the_others_stay_near_each_other(bad: float, delay: int, build: Any) -> None:
    def survive(transport: Transport) -> Tensor | None:
        try:
            return landed(bad, delay, partial(build, topology=Complete()), transport)
        except FloatingPointError:
            return None

    first, second, third = CPU.world(3, survive)
    assert second is None
    for x in (first, third):
        assert x is not None
        assert float(x.abs().max()) <= 2


def leave_or_wait(connected: Barrier, transport: Transport) -> str:
    """Worker 1 leaves once all are connected: its group goes with its frame."""
    mixer = Mixer([Row(torch.zeros(DIM))], Gossip(), exchange_of(transport, torch.device("cpu"), Ring()), 0)
    connected.wait(30)
    if transport.rank == 1:
        return "gone"
    try:
        mixer.step()
    except ConnectionError as error:
        return str(error)
    return "no error"


def test_a_lost_neighbour_is_named_within_seconds() -> None:
    first, _, third = CPU.world(3, partial(leave_or_wait, Barrier(3)), seconds=30)
    # Who learns of it leaves, too, and its connections with it: the last one may lose that one first.
    assert "worker 0 lost neighbour" in first
    assert "worker 2 lost neighbour" in third
    assert "lost neighbour 1" in first + third
