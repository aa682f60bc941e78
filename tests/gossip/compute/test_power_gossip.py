"""PowerGossip: power iteration on neighbours' differences, edge by edge in plain numpy; and the laws of the wire."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_decentral import GossipStrategy
from lightning_decentral.gossip import (
    Complete,
    DifferenceCompression,
    Every,
    Gossip,
    Hypercube,
    LowRank,
    OnePeerExponential,
    Outer,
    PowerGossip,
    RandomMatching,
    Ring,
    Topology,
    simulate,
)
from lightning_decentral.gossip.compute.codec.codec import MessageLayout
from lightning_decentral.gossip.compute.codec.counter_rng import key, uniform
from lightning_decentral.gossip.plan.weights import mixing_matrix
from lightning_decentral.shared.compute.buckets import Matrix
from lightning_decentral.shared.wire.transport import Transport
from tests.backends import Backend
from tests.gossip.test_resume import fit
from tests.gossip.wire.test_exchange import gradient
from tests.gossip.wire.test_exchange_codecs import copied, count, descend, mixer_of, start, still
from tests.tiny import in_processes

DIM, STEPS = 50, 7  # as in test_wire_codecs
MATRICES = (Matrix(2, 5, 6),)
PART = slice(2, 32)
CPU = Backend("cpu", "cpu")
PLANS: list[tuple[Topology, int]] = [(Ring(), 5), (Hypercube(), 4), (RandomMatching(rounds=4), 5), (Complete(), 3)]
Array = np.ndarray[Any, Any]


def fresh(edge: tuple[int, int], turn: int, rows: int, rank: int) -> Array:
    """The random matrix that both ends of an edge draw."""
    return uniform(rows, rank, key(key(*edge, 0), turn, 0), torch.zeros((), dtype=torch.float64)).numpy()


def by_edge(x: Array, topology: Topology, rank: int, steps: int, delay: int, descent: float) -> Array:
    """[steps + 1, size, dim]: an edge at a time; delay 0 or 1."""
    size, path, turns = len(x), [x], dict[tuple[int, int], int]()
    bases: dict[tuple[int, int], Array] = {}
    sent: tuple[int, Array] | None = None

    def mixed(x: Array, step: int) -> Array:
        W, change = mixing_matrix(topology, size, step), np.zeros_like(x)
        for edge in [(i, j) for i in range(size) for j in range(i + 1, size) if W[i, j] > 0]:
            i, j = edge
            turn = turns.setdefault(edge, 0)
            difference = x[j] - x[i]
            matrix = difference[PART].reshape(5, 6)
            matrix = matrix.T if turn % 2 else matrix
            S = bases.setdefault(edge, np.linalg.qr(1e-6 * fresh(edge, 0, 6, rank))[0])
            D = matrix @ S
            seen = D @ S.T
            difference[PART] = (seen.T if turn % 2 else seen).reshape(-1)
            change[i] += W[i, j] * difference
            change[j] -= W[i, j] * difference
            turns[edge] += 1
            bases[edge] = np.linalg.qr(D / np.linalg.norm(D) + 1e-6 * fresh(edge, turn + 1, len(D), rank))[0]
        return change

    for step in range(steps):
        x = x - descent * gradient(torch.from_numpy(x), step).numpy()
        if delay == 0:
            x = x + mixed(x, step)
        elif sent is not None:
            x = x + mixed(sent[1], sent[0])
        sent = step, x
        path.append(x)
    return np.stack(path)


@pytest.mark.parametrize(("delay", "rank"), [(0, 2), (1, 1)])
@pytest.mark.parametrize(("topology", "size"), PLANS, ids=str)
def test_simulation_is_power_iteration_edge_by_edge(topology: Topology, size: int, delay: int, rank: int) -> None:
    x0, codec = start(size), PowerGossip(rank=rank)
    measured = simulate(topology, Gossip(), gradient, x0, 12, 0.1, delay, codec=codec, matrices=MATRICES)
    expected = by_edge(x0.numpy(), topology, rank, 12, delay, 0.1)
    np.testing.assert_allclose(measured.numpy(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.threads
@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize(("topology", "size"), PLANS, ids=str)
def test_wire_equals_simulation(topology: Topology, size: int, delay: int) -> None:
    x0, codec, rate = start(size), PowerGossip(rank=2), 0.4
    path = torch.stack(CPU.world(size, partial(descend, CPU, x0, delay, rate, topology, [codec])), dim=2)[0]
    expected = simulate(topology, Gossip(rate=rate), gradient, x0, STEPS, 0.1, delay, codec=codec, matrices=MATRICES)
    torch.testing.assert_close(path, expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(
        simulate(topology, Gossip(rate=rate), still, x0, STEPS, 0.1, delay, codec=codec, matrices=MATRICES).mean(1),
        x0.mean(0).expand(STEPS + 1, DIM),
        rtol=1e-12,
        atol=1e-12,
    )


LAST = torch.zeros(4, DIM, dtype=torch.float64).index_fill_(1, torch.tensor([31]), 1.0)


@pytest.mark.parametrize(("topology", "delay", "x0"), [
    (Ring(), 0, start(4)), (Ring(), 1, start(4)), (Hypercube(), 1, start(4)), (RandomMatching(rounds=8), 0, start(4)),
    (Hypercube(), 0, LAST),
], ids=["ring", "ring, overlapped", "hypercube, overlapped", "matching", "one element differs"])  # fmt: skip
def test_mixing_at_full_rate_ends_at_the_exact_mean(topology: Topology, delay: int, x0: Tensor) -> None:
    """Without a rate to tune, also for workers that differ in nothing but the last row of a matrix."""
    x0 = x0 * torch.arange(1.0, 5.0, dtype=torch.float64).unsqueeze(1)
    path = simulate(topology, Gossip(), still, x0, 120, 0.1, delay, codec=PowerGossip(rank=1), matrices=MATRICES)
    assert float((path[-1] - x0.mean(0)).abs().max()) < 1e-5 * float((x0 - x0.mean(0)).abs().max())


def test_a_difference_of_that_rank_arrives_within_two_rounds() -> None:
    """The first half iteration finds the columns' space, the second sends all of it; one more than a power step."""
    x0 = start(2)
    seed = torch.Generator().manual_seed(0)
    left, right = (torch.randn(*shape, dtype=torch.float64, generator=seed) for shape in ((5, 2), (2, 6)))
    x0[1] = x0[0]
    x0[1, PART] += (left @ right).reshape(-1)
    path = simulate(Complete(), Gossip(), still, x0, 2, 0.1, 0, codec=PowerGossip(rank=2), matrices=MATRICES)
    assert float((path[1] - x0.mean(0)).abs().max()) > 1e-2
    torch.testing.assert_close(path[2], x0.mean(0).expand(2, DIM), rtol=1e-4, atol=1e-4)


def test_two_rounds_send_less_and_see_more_than_low_rank() -> None:
    """Of a difference with falling singular values, between two workers that stand still: the warm start at work."""
    x0 = torch.zeros(2, 600, dtype=torch.float64)
    seed = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(n, 20, dtype=torch.float64, generator=seed)).Q for n in (20, 30))
    x0[1] = (left * 0.7 ** torch.arange(20)).matmul(right.T).reshape(-1)
    matrices, far = (Matrix(0, 20, 30),), []
    for codec, steps, rate in ((PowerGossip(rank=2), 20, 1.0), (DifferenceCompression(LowRank(rank=2)), 10, 0.3)):
        path = simulate(Complete(), Gossip(rate=rate), still, x0, steps, 0.1, 0, codec=codec, matrices=matrices)
        far.append(float((path[-1] - x0.mean(0)).norm()))
    assert far[0] < far[1]


@pytest.mark.threads
def test_bytes_are_counted_by_the_formula() -> None:
    """Rank 2 of 5 x 6 and 20 numbers beside it: 10 + 20 and 12 + 20 in turn, and a header of two int64."""
    codec = PowerGossip(rank=2)
    assert codec.bytes(MessageLayout(DIM, MATRICES), torch.float32) == 4 * (2 * (5 + 6) // 2 + 20)
    assert codec.bytes(MessageLayout(DIM), torch.float32) == 4 * DIM
    for topology, targets in ((Ring(), 2), (Complete(), 3)):
        for traffic, message_bytes in CPU.world(4, partial(count, codec, topology)):
            assert message_bytes == codec.bytes(MessageLayout(DIM, MATRICES), torch.float32)
            assert traffic.bytes_sent == targets * (4 * (4 * 30 + 3 * 32) + STEPS * 16)


def worker(delay: int, transport: Transport) -> tuple[Tensor, Tensor]:
    """(uninterrupted, resumed after three steps)."""
    ends, saved = [], None
    for resume in (False, True):
        x = start(4)[transport.rank].float()
        mixer = mixer_of(transport, x.device, Hypercube(), PowerGossip(rank=2), x, delay, Gossip(rate=0.4))
        for step in range(3, 9) if resume else range(9):
            if resume and step == 3:
                assert saved is not None
                x.copy_(saved[0])
                mixer.load_state_dict(saved[1])
            x.sub_(0.1 * (x - transport.rank))
            mixer.step()
            if not resume and step == 2:
                saved = x.clone(), copied(mixer.state_dict())
        mixer.drain()
        ends.append(x)
    return ends[0], ends[1]


@pytest.mark.threads
@pytest.mark.parametrize("delay", [0, 1, 2])
def test_resume_is_bit_equal(delay: int) -> None:
    for whole, resumed in CPU.world(4, partial(worker, delay)):
        assert torch.equal(whole, resumed)


def test_a_trainer_resumes_bit_for_bit(tmp_path: Path) -> None:
    options = {"codec": PowerGossip(rank=1), "delay": 1}
    whole, part = tmp_path / "whole", tmp_path / "part"
    in_processes(fit, whole, 3, 9, options, {}, {}, 4, None, False)
    in_processes(fit, part, 3, 9, options, {}, {}, None, whole / "at-step=4.ckpt", False)
    for rank in range(3):
        expected, measured = (torch.load(f / f"own-{rank}.pt") for f in (whole, part))
        assert [name for name in expected if not torch.equal(expected[name], measured[name])] == []


def poisoned(bad: float, transport: Transport) -> tuple[Tensor, int, str]:
    x = torch.linspace(-1, 1, DIM) * (transport.rank + 1)
    mixer = mixer_of(transport, torch.device("cpu"), Complete(), PowerGossip(rank=2), x, 0, Gossip(rate=0.4))
    mixer.step()
    if transport.rank == 1:
        x[20] = bad
    try:
        mixer.step()
    except FloatingPointError as error:
        return x, mixer.exchange.traffic().refused, str(error)
    return x, mixer.exchange.traffic().refused, ""


@pytest.mark.threads
@pytest.mark.filterwarnings("ignore:worker . refused")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_message_that_is_not_finite_never_enters_a_healthy_worker(bad: float) -> None:
    first, second, third = CPU.world(3, partial(poisoned, bad))
    for x, refused, error in (first, third):
        assert bool(torch.isfinite(x).all())
        assert (refused, error) == (1, "")
    assert second[2].startswith("worker 1: its parameters hold NaN or infinity")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, torch.float32], ids=str)
def test_other_types_of_parameters(dtype: torch.dtype) -> None:
    x0 = start(4).to(dtype)
    matrices = () if dtype.is_complex else MATRICES
    path = simulate(Ring(), Gossip(), still, x0, 60, 0.1, 0, codec=PowerGossip(rank=2), matrices=matrices)
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(path[-1], x0.mean(0).expand(4, DIM), rtol=tolerance, atol=tolerance)


def test_a_rule_that_reads_the_mixture_itself_gets_parameters() -> None:
    """Outer steps compare what was mixed with an anchor: a mixture of sketches would be nowhere near."""
    topology, x0 = Every(2, Complete()), start(4)
    paths = [
        simulate(topology, Outer(), gradient, x0[:1].expand(4, -1), 60, 0.02, 0, codec=codec, matrices=MATRICES)
        for codec in (None, PowerGossip(rank=4))
    ]
    torch.testing.assert_close(paths[1][-1].mean(0), paths[0][-1].mean(0), rtol=0.05, atol=0.05)


def test_what_it_refuses() -> None:
    with pytest.raises(ValueError, match="PowerGossip's rank must be at least 1, got 0"):
        PowerGossip(rank=0)
    with pytest.raises(ValueError, match=r"PowerGossip needs a symmetric mixing matrix, .*codec=DifferenceCompression"):
        PowerGossip().check(OnePeerExponential(), 4, GossipStrategy().weights, 1)
    with pytest.raises(ValueError, match=r"one round at a time, got delay=2: use delay=1 or 0"):
        PowerGossip().check(Hypercube(), 4, GossipStrategy().weights, 2)
    with pytest.raises(ValueError, match=r"remembers by itself, got PowerGossip\(rank=4\): unwrap it"):
        DifferenceCompression(PowerGossip())  # type: ignore[arg-type]
