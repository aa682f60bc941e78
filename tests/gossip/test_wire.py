"""LAW: a run on the wire equals the simulation step for step, for every topology, rule and delay."""

from dataclasses import dataclass

import pytest
import torch
from tests.gossip.topologies import every_topology
from torch import Tensor

from lightning_decentral.gossip.cliques import partitions
from lightning_decentral.gossip.combine import Gossip
from lightning_decentral.gossip.exchange import CliqueExchange, Exchange, PeerExchange
from lightning_decentral.gossip.mixer import Mixer
from lightning_decentral.gossip.simulation import simulate
from lightning_decentral.gossip.topology import Complete, Every, OnePeerExponential, Ring, Topology
from lightning_decentral.gossip.weights import MetropolisHastings, Own, Weights
from lightning_decentral.transport import transport
from tests.world import world

CPU = torch.device("cpu")
STEPS = 9
DIM = 5


@dataclass
class Row:
    flat: Tensor

    def adopt(self) -> None:
        """Nothing else holds it."""


def gradient(x: Tensor, step: int) -> Tensor:
    """Of a quadratic with another minimum and curvature for each worker, and a term that depends on the step."""
    rank = torch.arange(x.shape[0], dtype=x.dtype).unsqueeze(1)
    return (1 + 0.1 * rank) * (x - rank - 0.3 * step)


def exchange_of(group: object, topology: Topology, weights: Weights = Own()) -> PeerExchange:
    return PeerExchange(topology, weights, transport(group, CPU), CPU)


def run(size: int, x0: Tensor, delay: int, rate: float, build: object) -> Tensor:
    """Every worker on a wire of its own, in the simulation's terms: [steps + 1, size, dim]."""

    def worker(group: object) -> Tensor:
        exchange: Exchange = build(group)  # type: ignore[operator]
        rank = group.rank()  # type: ignore[attr-defined]
        buckets = [Row(x0[rank, :2].clone()), Row(x0[rank, 2:].clone())]  # two buckets where the simulation has one
        mixer = Mixer(buckets, Gossip(rate=rate), exchange, delay)
        trajectory = [torch.cat([b.flat for b in buckets])]
        for step in range(STEPS):
            rows = torch.zeros_like(x0)
            rows[rank] = torch.cat([b.flat for b in buckets])
            update = gradient(rows, step)[rank]
            buckets[0].flat.sub_(update[:2], alpha=0.1)
            buckets[1].flat.sub_(update[2:], alpha=0.1)
            mixer.step()
            trajectory.append(torch.cat([b.flat for b in buckets]))
        mixer.drain()
        return torch.stack(trajectory)

    return torch.stack(world(size, worker), dim=1)


def start(size: int) -> Tensor:
    return torch.randn(size, DIM, generator=torch.Generator().manual_seed(size), dtype=torch.float64)


@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize(("topology", "size"), every_topology(), ids=str)
def test_wire_equals_simulation(topology: Topology, size: int, delay: int) -> None:
    x0, rate = start(size), 0.4 if delay > 1 else 1.0
    expected = simulate(topology, Gossip(rate=rate), gradient, x0, STEPS, 0.1, delay)
    measured = run(size, x0, delay, rate, lambda group: exchange_of(group, topology))
    torch.testing.assert_close(measured, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_simulation_is_the_written_recursion(delay: int) -> None:
    """Against the recursion in plain numpy terms: x(t+1) = x(t) + u(t) + rate (W - I) x_sent."""
    from lightning_decentral.gossip.weights import mixing_matrix

    size, rate, topology = 5, 0.5, Ring()
    x0 = start(size)
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


@pytest.mark.parametrize("topology", [Complete(), Every(2, Complete())], ids=str)
@pytest.mark.parametrize("delay", [0, 1])
def test_cliques_equal_peers_and_simulation(topology: Topology, delay: int) -> None:
    size = 5
    cliques = partitions(topology, Own(), size)
    assert cliques is not None
    expected = simulate(topology, Gossip(), gradient, start(size), STEPS, 0.1, delay)
    everyone = tuple(range(size))

    def build(group: object) -> Exchange:
        return CliqueExchange(cliques, {everyone: transport(group, CPU)}, group.rank(), CPU)  # type: ignore[attr-defined]

    torch.testing.assert_close(run(size, start(size), delay, 1.0, build), expected, rtol=1e-12, atol=1e-12)


def test_weights_are_composed_on_the_wire_too() -> None:
    size, topology, weights = 4, Ring(), MetropolisHastings()
    expected = simulate(topology, Gossip(), gradient, start(size), STEPS, 0.1, weights=weights)
    measured = run(size, start(size), 1, 1.0, lambda group: exchange_of(group, topology, weights))
    torch.testing.assert_close(measured, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("topology", "size"), every_topology(), ids=str)
def test_the_mean_is_preserved(topology: Topology, size: int) -> None:
    x0 = start(size)
    trajectory = simulate(topology, Gossip(), lambda x, _: torch.zeros_like(x), x0, STEPS, 0.1)
    torch.testing.assert_close(trajectory.mean(1), x0.mean(0).expand(STEPS + 1, DIM), rtol=1e-12, atol=1e-12)


def test_noise_identity_tells_overlapped_from_blocking() -> None:
    """Pure noise, Ring: Xi^2(AWC) = Xi^2(ATC) + (1 - 1/n) eta^2 sigma^2 in the steady state (facts of the literature)."""
    size, dim, steps, eta = 6, 4000, 60, 0.1
    noise = torch.randn(steps, size, dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x0 = torch.zeros(size, dim, dtype=torch.float64)
    spread = []
    for delay in (0, 1):
        last = simulate(Ring(), Gossip(), lambda x, t: noise[t], x0, steps, eta, delay)[-1]
        spread.append(float((last - last.mean(0)).square().sum(1).mean() / dim))
    assert spread[1] - spread[0] == pytest.approx((1 - 1 / size) * eta**2, rel=0.05)


def test_bytes_are_counted_by_the_formula() -> None:
    """Ring: two neighbours hear DIM float64 and a header of two int64 in every round."""

    def worker(group: object) -> tuple[int, int]:
        exchange = exchange_of(group, Ring())
        mixer = Mixer([Row(torch.zeros(DIM, dtype=torch.float64))], Gossip(), exchange, 1)
        for _ in range(STEPS):
            mixer.step()
        mixer.drain()
        traffic = exchange.traffic()
        return traffic.bytes_sent, traffic.rounds

    assert world(4, worker) == [(STEPS * 2 * (DIM * 8 + 16), STEPS)] * 4


def test_a_worker_in_another_round_is_named() -> None:
    def worker(group: object) -> None:
        mixer = Mixer([Row(torch.zeros(DIM))], Gossip(), exchange_of(group, Ring()), 0)
        mixer.round += group.rank() == 2  # type: ignore[attr-defined]
        mixer.step()

    with pytest.raises(
        RuntimeError, match=r"worker \d is in round \d but heard round \d from worker \d|lost neighbour"
    ):
        world(3, worker, seconds=5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_message_that_is_not_finite_never_enters_a_healthy_worker(bad: float) -> None:
    """The receiver keeps its own value with that weight; the sender's own error surfaces, naming it."""

    def worker(group: object) -> tuple[Tensor, int, str]:
        rank = group.rank()  # type: ignore[attr-defined]
        exchange = exchange_of(group, OnePeerExponential())
        row = Row(torch.full((DIM,), float(rank)))
        mixer = Mixer([row], Gossip(), exchange, 0)
        if rank == 1:
            row.flat[3] = bad
        try:
            mixer.step()
        except FloatingPointError as error:
            return row.flat, exchange.traffic().refused, str(error)
        return row.flat, exchange.traffic().refused, ""

    with pytest.warns(UserWarning, match="refused a message from worker 1 in round 0"):
        results = world(2, worker)
    assert results[0] == (pytest.approx(torch.zeros(DIM)), 1, "")
    assert results[1][2].startswith("worker 1: its parameters hold NaN or infinity in round 0")


def test_a_lost_neighbour_is_named_within_seconds() -> None:
    def worker(group: object) -> str:
        rank = group.rank()  # type: ignore[attr-defined]
        exchange = exchange_of(group, Ring())
        mixer = Mixer([Row(torch.zeros(DIM))], Gossip(), exchange, 0)
        if rank == 1:
            return "gone"  # its group is destroyed with the thread's frame
        try:
            mixer.step()
        except ConnectionError as error:
            return str(error)
        return "no error"

    messages = world(3, worker, seconds=10)
    assert "worker 0 lost neighbour 1" in messages[0]
    assert "lost neighbour" in messages[2]
