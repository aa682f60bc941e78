"""The largest stable rate against brute force: the roots, the lifted system and the recursion itself."""

import math
import re
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_decentral.gossip import (
    Auto,
    Complete,
    Every,
    Exponential,
    FromGraph,
    Gossip,
    Hypercube,
    OnePeerExponential,
    OnePeerRing,
    RandomMatching,
    Ring,
    Star,
    Topology,
    Weights,
    largest_stable_rate,
)
from lightning_decentral.gossip.plan.stability import rate_for_any_order, stable_at_one, stable_rate
from lightning_decentral.gossip.plan.weights import Own, mixing_matrix, spectrum
from tests.gossip.topologies import directed_circulant, every_topology

MARGIN = 2e-3  # bisection stops at 1e-3


def lifted_growth(topology: Topology, size: int, delay: int, rate: float, weights: Weights | None = None) -> float:
    """Per step: the largest |eigenvalue| of a period of X(t+1) = [[I, 0, ..., rate (W_t - I)], [I, 0, ...], ...] X(t).

    The eigenvalue 1 of the mean is moved to 0 by 1 1^T / n in the newest block: where the mean is, X drops it.
    """
    depth, period = max(1, delay), topology.period(size)
    apart = np.eye(size) - 1 / size
    product = np.eye(size * depth)
    for step in range(period):
        block = np.eye(size * depth, k=-size)
        block[:size, :size] = apart
        block[:size, -size:] += rate * apart @ (mixing_matrix(topology, size, step, weights) - np.eye(size))
        product = block @ product
    return float(np.abs(np.linalg.eigvals(product)).max() ** (1 / period))


def distance_after(topology: Topology, size: int, delay: int, rate: float, periods: int) -> float:
    """Run x(t+1) = x(t) + rate (W_s - I) sent_s as it is written; distance to the mean over the first."""
    depth = max(1, delay)
    history = [np.random.default_rng(0).normal(size=(size, 4))] * depth
    first = np.linalg.norm(history[0] - history[0].mean(0))
    for step in range(periods * topology.period(size)):
        sent = history[-depth]
        mixed = mixing_matrix(topology, size, step, None) @ sent
        history = [*history[1:], history[-1] + rate * (mixed - sent)]
    return float(np.linalg.norm(history[-1] - history[-1].mean(0)) / first)


PLANS = every_topology(range(2, 8))


@pytest.mark.sampled
@pytest.mark.parametrize(("topology", "size"), PLANS, ids=str)
def test_what_is_accepted_is_stable(topology: Topology, size: int) -> None:
    for delay in range(6):
        limit = largest_stable_rate(topology, size, delay)
        growth = [lifted_growth(topology, size, delay, share * limit) for share in (0.25, 0.5, 0.75, 0.9, 1 - MARGIN)]
        assert all(one < 1 for one in growth), (delay, growth)


@pytest.mark.parametrize(("topology", "size"), [plan for plan in PLANS if plan[0].period(plan[1]) == 1], ids=str)
def test_one_matrix_more_than_the_limit_is_unstable(topology: Topology, size: int) -> None:
    for delay in range(1, 6):
        growth = lifted_growth(topology, size, delay, largest_stable_rate(topology, size, delay) * 1.01)
        assert growth > 1, (delay, growth)


@settings(deadline=None, max_examples=60)
@given(st.integers(3, 9), st.integers(0, 300), st.integers(1, 7))
def test_limit_of_directed_graphs(size: int, seed: int, delay: int) -> None:
    """Complex eigenvalues: a circulant of drawn offsets."""
    offsets = np.random.default_rng(seed).choice(np.arange(1, size), size=2, replace=False).tolist()
    topology = FromGraph(directed_circulant(size, [1, *offsets]))
    limit = largest_stable_rate(topology, size, delay)
    assert lifted_growth(topology, size, delay, limit * 0.995) < 1 < lifted_growth(topology, size, delay, limit * 1.005)


@given(st.integers(1, 9), st.floats(0.05, 1.95), st.floats(-1.5, 1.5))
def test_limit_is_where_the_roots_leave_the_unit_circle(flights: int, modulus: float, angle: float) -> None:
    """W with eigenvalues 1 - modulus e^(+-i angle), which needs no graph."""
    real, imaginary = modulus * math.cos(angle), modulus * math.sin(angle)
    matrix = np.eye(2) - np.array([[real, -imaginary], [imaginary, real]])
    limit = stable_rate(matrix, flights)

    def largest_root(rate: float) -> float:
        coefficients = np.zeros(flights + 1, complex)
        coefficients[0] = 1
        coefficients[1] -= 1
        coefficients[-1] += rate * modulus * np.exp(1j * angle)
        return float(np.abs(np.roots(coefficients)).max())

    assert largest_root(limit * 0.999) < 1 < largest_root(limit * 1.001)
    assert largest_root(limit * 0.5) < 1


@pytest.mark.parametrize(("delay", "rate"), [(0, 2), (1, 2), (2, 1), (3, 0.618034), (4, 0.445042)])
def test_published_limits(delay: int, rate: float) -> None:
    """One matrix whose smallest eigenvalue is 0."""
    assert largest_stable_rate(Complete(), 5, delay) == pytest.approx(rate, abs=1e-6)


@pytest.mark.parametrize("delay", range(1, 9))
@pytest.mark.parametrize("inner", [Complete(), Ring(), Auto(), OnePeerExponential(), RandomMatching()], ids=str)
def test_every_k_with_delay_k_is_stable_at_rate_one(inner: Topology, delay: int) -> None:
    topology = Every(delay, inner)
    assert largest_stable_rate(topology, 6, delay) == pytest.approx(largest_stable_rate(inner, 6, 1))
    assert largest_stable_rate(topology, 6, delay) > 1
    assert distance_after(topology, 6, delay, 1.0, periods=30 if inner.period(6) < 10 else 2) < 0.05


def test_a_delay_that_is_longer_than_every_has_more_in_flight() -> None:
    limits = [largest_stable_rate(Every(2, Complete()), 4, delay) for delay in range(1, 9)]
    assert limits == pytest.approx([2, 2, 1, 1, 0.618034, 0.618034, 0.445042, 0.445042], abs=1e-6)


def test_the_recursion_itself_contracts_below_the_limit_and_grows_above() -> None:
    limit = largest_stable_rate(Ring(), 6, 3)
    assert distance_after(Ring(), 6, 3, 0.95 * limit, periods=400) < 1e-2
    assert distance_after(Ring(), 6, 3, 1.05 * limit, periods=400) > 10


UNSAFE = RandomMatching(seed=0, rounds=5)


def test_a_sequence_can_diverge_where_each_of_its_matrices_is_stable() -> None:
    each = min(stable_rate(mixing_matrix(UNSAFE, 7, step), 2) for step in range(5))
    assert each == pytest.approx(1)
    assert distance_after(UNSAFE, 7, 2, 0.999 * each, periods=400) > 1e3
    limit = largest_stable_rate(UNSAFE, 7, 2)
    assert 2 / 3 < limit < 0.999
    assert lifted_growth(UNSAFE, 7, 2, limit * (1 - MARGIN)) < 1 < lifted_growth(UNSAFE, 7, 2, limit * (1 + MARGIN))


@dataclass(frozen=True)
class Drawn(Topology):
    """Another matching in every step, from a drawn list."""

    steps: tuple[tuple[int, ...], ...]

    def period(self, size: int) -> int:
        return len(self.steps)

    def sources(self, rank: int, size: int, step: int) -> tuple[int, ...]:
        partner = self.steps[step % len(self.steps)][rank]
        return (partner,) if partner != rank else ()


@dataclass(frozen=True)
class PassedOn(Topology):
    """Everyone takes the value of the next one for its own."""

    def sources(self, rank: int, size: int, step: int) -> tuple[int, ...]:
        return ((rank + 1) % size,)

    def row(self, rank: int, size: int, step: int) -> dict[int, float]:
        return {rank: 0.0, (rank + 1) % size: 1.0}


@dataclass(frozen=True)
class InTurn(Topology):
    """In each step the sources of all ranks."""

    steps: tuple[tuple[tuple[int, ...], ...], ...]

    def period(self, size: int) -> int:
        return len(self.steps)

    def sources(self, rank: int, size: int, step: int) -> tuple[int, ...]:
        return self.steps[step % len(self.steps)][rank]


def partners(order: list[int]) -> tuple[int, ...]:
    found = dict(enumerate(range(len(order))))
    for i, j in zip(order[::2], order[1::2], strict=False):
        found.update({i: j, j: i})
    return tuple(found[rank] for rank in range(len(order)))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.permutations(range(6)).map(partners), min_size=1, max_size=6), st.integers(1, 6))
def test_the_rate_for_any_order_never_grows(steps: list[tuple[int, ...]], flights: int) -> None:
    topology = Drawn(tuple(steps))
    rate = rate_for_any_order(mixing_matrix(topology, 6, 0), flights)
    assert rate == pytest.approx(2 / (2 * flights - 1))
    assert lifted_growth(topology, 6, flights, rate * 0.999) <= 1 + 1e-9


def test_periods_too_large_to_lift_get_the_rate_for_any_order() -> None:
    assert largest_stable_rate(RandomMatching(), 64, 5) == pytest.approx(2 / 9)
    assert largest_stable_rate(Complete(), 64, 5) == pytest.approx(2 * math.sin(math.pi / 18))


@pytest.mark.parametrize("delay", [0, 1, 5])
def test_one_worker_is_stable_at_every_rate(delay: int) -> None:
    for topology, size in every_topology(range(1, 2)):
        assert largest_stable_rate(topology, size, delay) == math.inf


@given(st.sampled_from(every_topology(range(2, 10))), st.integers(0, 100))
def test_spectrum_by_blocks_is_the_spectrum(plan: tuple[Topology, int], step: int) -> None:
    """By the traces of powers, which need no order of eigenvalues."""
    matrix = mixing_matrix(*plan, step)
    values = spectrum(matrix)
    for power in range(1, 5):
        assert (values**power).sum() == pytest.approx(np.trace(np.linalg.matrix_power(matrix, power)), abs=1e-9)


@pytest.mark.parametrize(
    ("topology", "size", "rate"),
    [(Auto(), 5, 1.0), (OnePeerExponential(), 5, 1.0), (OnePeerExponential(), 8, 1.0), (OnePeerRing(), 7, 1.0)],
)
def test_sequences_that_contract_though_no_matrix_alone_does_are_not_refused(
    topology: Topology, size: int, rate: float
) -> None:
    assert min(stable_rate(mixing_matrix(topology, size, step), 2) for step in range(topology.period(size))) <= rate
    assert lifted_growth(topology, size, 2, rate) < 0.98
    assert largest_stable_rate(topology, size, 2) > rate
    Gossip(rate=rate).check(topology, size, Gossip().weights, 2)


@pytest.mark.parametrize("delay", [3, 4, 6, 64, 128])
def test_rates_that_an_error_proposes_contract_fast(delay: int) -> None:
    with pytest.raises(ValueError, match=r"use Gossip\(rate=") as error:
        Gossip().check(Complete(), 8, Gossip().weights, delay)
    proposed = re.search(r"Gossip\(rate=([0-9.]+)\)", str(error.value))
    assert proposed is not None
    assert lifted_growth(Complete(), 8, delay, float(proposed[1])) ** delay < 0.65


@pytest.mark.parametrize("size", range(3, 9))
def test_a_rate_at_the_limit_is_refused_however_it_is_rounded(size: int) -> None:
    """A star's limit with two messages in flight is 1, whose rounding differs with its size."""
    assert largest_stable_rate(Star(), size, 2) == pytest.approx(1)
    with pytest.raises(ValueError, match=r"stay below 1; use Gossip\(rate=0.5\), or topology=Every\(2, ...\)"):
        Gossip().check(Star(), size, Own(), 2)


def test_only_a_delay_that_can_be_shared_out_is_answered_by_talking_less_often() -> None:
    with pytest.raises(ValueError, match=r"stay below 1; use Gossip\(rate=[0-9.]+\)$"):
        Gossip().check(PassedOn(), 3, Own(), 1)


def test_a_period_that_keeps_its_length_at_rate_1_alone_is_refused() -> None:
    ring, everyone, nobody = ((1, 2), (0, 3), (1, 3), (0, 2)), ((1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)), ((),) * 4
    ends, crossed = ((3,), (2,), (1,), (0,)), ((2,), (3,), (0,), (1,))
    topology = InTurn((ring, everyone, nobody, nobody, ends, crossed, nobody, crossed))
    assert lifted_growth(topology, 4, 3, 1.0) == pytest.approx(1)
    with pytest.raises(ValueError, match="doesn't contract on InTurn"):
        Gossip().check(topology, 4, Own(), 3)
    Gossip(rate=0.9).check(topology, 4, Own(), 3)


@pytest.mark.parametrize("topology", [Ring(), Exponential(), OnePeerExponential(), Hypercube(), Every(4, Complete())])
def test_what_is_seen_to_be_stable_without_eigenvalues_is(topology: Topology) -> None:
    for delay in (0, 1):
        assert stable_at_one(topology, 8, delay, Own())
        assert largest_stable_rate(topology, 8, delay) > 1 - 1e-9
    assert stable_at_one(topology, 8, 4, Own()) == isinstance(topology, Every)


def test_a_thousand_workers_are_checked_without_eigenvalues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_decentral.gossip.plan.stability.largest_stable_rate", None)
    Gossip().check(Hypercube(), 1024, Own(), 1)
