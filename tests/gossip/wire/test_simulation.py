"""Sparse mixing equals the dense matrix, and a thousand workers are no burden."""

import tracemalloc
from dataclasses import dataclass

import networkx as nx
import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_decentral.gossip import (
    Combine,
    Complete,
    ConsensusControl,
    Every,
    ExactDiffusion,
    Exponential,
    FromGraph,
    Gossip,
    GradientTracking,
    LearningRatePower,
    LinearRate,
    Own,
    PushSum,
    QuasiGlobalMomentum,
    Ring,
    Topology,
    Uniform,
    Weights,
    simulate,
)
from lightning_decentral.gossip.plan.weights import compressed, entries, mixing_matrix, spectrum
from lightning_decentral.gossip.wire.consensus import mixer_of
from lightning_decentral.gossip.wire.simulation import MatrixExchange, as_tensor
from tests.gossip.topologies import directed_circulant, every_topology

MANY = 64  # workers, where a row of few neighbours is mostly zero
AT_MANY = [*every_topology(range(MANY, MANY + 2)), (FromGraph(nx.random_regular_graph(4, MANY, seed=1)), MANY)]


def random(size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(size, 7, generator=torch.Generator().manual_seed(size), dtype=dtype)


def written(topology: Topology, size: int, step: int, weights: Weights) -> Tensor:
    """W entry by entry, from the rows themselves."""
    matrix = torch.zeros(size, size, dtype=torch.float64)
    for rank in range(size):
        for source, weight in weights.row(topology, rank, size, step).items():
            matrix[rank, source] = weight
    return matrix


@pytest.mark.sampled
@pytest.mark.parametrize(("topology", "size"), [*every_topology(), *AT_MANY], ids=str)
def test_mixing_equals_the_dense_matrix_in_every_phase(topology: Topology, size: int) -> None:
    exchange, x = MatrixExchange(topology, Own(), size), random(size)
    for step in range(min(topology.period(size), 12) + 1):
        mixed = exchange.launch(x, step, 0).land()
        expected = written(topology, size, step, Own()) @ x
        torch.testing.assert_close(mixed, expected, rtol=1e-13, atol=1e-13)
        assert exchange.neighbours(step).silent == all(not topology.sources(rank, size, step) for rank in range(size))


def test_both_kinds_of_product_are_among_those_tested() -> None:
    kinds = {entries(topology, size, 0).mostly_zero for topology, size in AT_MANY}
    assert kinds == {True, False}


@pytest.mark.parametrize(("topology", "size"), AT_MANY, ids=str)
def test_products_of_plans_equal_dense_ones(topology: Topology, size: int) -> None:
    other = np.random.default_rng(0).standard_normal((size, 5))
    np.testing.assert_allclose(
        entries(topology, size, 1) @ other, mixing_matrix(topology, size, 1) @ other, rtol=0, atol=1e-13
    )


def test_other_weights_are_used() -> None:
    star, x = FromGraph(nx.star_graph(MANY - 1)), random(MANY)
    mixed = MatrixExchange(star, Uniform(), MANY).launch(x, 0, 0).land()
    torch.testing.assert_close(mixed, written(star, MANY, 0, Uniform()) @ x, rtol=1e-13, atol=1e-13)
    assert not torch.allclose(mixed, written(star, MANY, 0, Own()) @ x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.complex64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("topology", [Ring(), Complete()], ids=str)
def test_the_message_keeps_its_type_and_is_rounded_once(topology: Topology, dtype: torch.dtype) -> None:
    x = random(MANY).to(dtype)
    mixed = MatrixExchange(topology, Own(), MANY).launch(x, 0, 0).land()
    exact = written(topology, MANY, 0, Own()).to(torch.complex128) @ x.to(torch.complex128)
    assert mixed.dtype == dtype
    error = (mixed.to(torch.complex128) - exact).abs().max()
    sums = MANY * torch.finfo(torch.promote_types(dtype, torch.float32)).eps  # of 64 terms, before the one rounding
    assert float(error) <= (torch.finfo(dtype).eps + sums) * float(x.abs().max())


def test_phases_are_built_once_and_silent_ones_are_one() -> None:
    at = MatrixExchange(Every(4, Exponential()), Own(), MANY).neighbours
    assert at(3) is at(7)
    assert at(0) is at(1)
    assert [at(step).silent for step in range(4)] == [True, True, True, False]


def test_rows_of_different_lengths() -> None:
    rows = [{0: 0.25, 3: 0.75}, {1: 1.0}, {2: 0.5, 0: 0.25, 1: 0.25}, {3: 1.0}]
    x = torch.eye(4, dtype=torch.float64)
    expected = torch.tensor([[0.25, 0, 0, 0.75], [0, 1, 0, 0], [0.25, 0.25, 0.5, 0], [0, 0, 0, 1]]).double()
    torch.testing.assert_close(as_tensor(compressed(rows)) @ x, expected)
    np.testing.assert_array_equal(compressed(rows)._gathered(x.numpy()), expected.numpy())


@pytest.mark.parametrize("offsets", [[1, 2], [1, 2, 4], [2, 6]], ids=str)
def test_eigenvalues_of_directed_circulants_equal_lapacks(offsets: list[int]) -> None:
    matrix = mixing_matrix(FromGraph(directed_circulant(12, offsets)), 12, 0)
    found, expected = spectrum(matrix), np.linalg.eigvals(matrix)
    apart = np.abs(found[:, None] - expected[None, :])
    assert len(found) == 12
    assert max(apart.min(axis=0).max(), apart.min(axis=1).max()) < 1e-6  # LAPACK's double ones are that far off


# ---- the trajectory need not be kept --------------------------------------------------------------------------


def gradient(x: Tensor, step: int) -> Tensor:
    return x - torch.arange(len(x), dtype=x.dtype).unsqueeze(1)


@pytest.mark.parametrize("every", [1, 3, 10, 11])
def test_every_keeps_some_states_of_the_same_run(every: int) -> None:
    whole = simulate(Ring(), Gossip(), gradient, random(6), 10, 0.1)
    kept = simulate(Ring(), Gossip(), gradient, random(6), 10, 0.1, every=every)
    torch.testing.assert_close(kept, whole[::every], rtol=0, atol=0)


def test_keeping_none_is_refused() -> None:
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        simulate(Ring(), Gossip(), gradient, random(6), 10, 0.1, every=0)


def test_a_thousand_workers_find_their_minimum() -> None:
    """1,024 workers with another quadratic each: the mean falls to the mean of their minima; dense W is 8 MiB."""
    size, rate = 1024, 0.05
    x0 = torch.zeros(size, 1, dtype=torch.float64)
    tracemalloc.start()
    last = simulate(Exponential(), Gossip(), gradient, x0, 200, rate, every=200)[-1]
    largest = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    expected = (size - 1) / 2 * (1 - (1 - rate) ** 200)
    torch.testing.assert_close(last.mean(), torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=0)
    assert largest < size * size * 8  # what Python and numpy allocate: no dense matrix


# ---- what users watch of it ---------------------------------------------------------------------------------------


@dataclass
class Rows:
    flat: Tensor

    def adopt(self) -> None:
        """Nothing else holds them."""


def after(combine: Combine | ConsensusControl, learning_rates: list[float]) -> dict[str, float]:
    """What a mixer says after a step with each of these learning rates; the distance doesn't change."""
    mixer = mixer_of(combine, MatrixExchange(Ring(), Own(), 4), 0, lambda: None)
    mixer.extend([Rows(random(4))])
    for learning_rate in learning_rates:
        mixer.step(learning_rate)
    return mixer.mixing()


def test_a_schedules_rate_is_that_of_the_last_round() -> None:
    assert after(Gossip(rate=LinearRate(first=1.0, last=0.5, rounds=4)), [0.1] * 3) == {"mixing_rate": 0.75}
    assert after(GradientTracking(rate=LearningRatePower(power=2)), [0.4, 0.1]) == {"mixing_rate": 0.0625}


@pytest.mark.parametrize(("combine", "said"), [
    (Gossip(rate=0.3), {"mixing_rate": 0.3}), (ExactDiffusion(rate=0.4), {"mixing_rate": 0.4}),
    (QuasiGlobalMomentum(rate=0.2), {"mixing_rate": 0.2}), (PushSum(), {}),
], ids=str)  # fmt: skip
def test_a_rule_says_what_it_has(combine: Combine, said: dict[str, float]) -> None:
    assert after(combine, [0.1] * 2) == said


def test_consensus_control_says_its_target_and_what_it_measured() -> None:
    control = ConsensusControl(target=5.0, lag=1, probe=1, inner=Gossip(rate=0.5))
    assert after(control, [0.1]) == {"mixing_rate": 0.5, "consensus_target": 5.0}
    x = random(4)
    moved = written(Ring(), 4, 0, Own()) @ x - x
    told = float(moved.norm() / x.norm())  # of the first round, read after the second step
    assert after(control, [0.1] * 2) == pytest.approx(
        {"mixing_rate": 0.5, "consensus_target": 5.0, "consensus_measured": told}
    )


@pytest.mark.sampled
@pytest.mark.parametrize(("topology", "size"), every_topology(), ids=str)
def test_the_diagonal_is_each_workers_weight_of_itself(topology: Topology, size: int) -> None:
    matrix = MatrixExchange(topology, Own(), size)
    for step in range(min(topology.period(size), 8)):
        expected = written(topology, size, step, Own()).diagonal().unsqueeze(1)
        torch.testing.assert_close(torch.from_numpy(matrix.neighbours(step).own), expected, rtol=0, atol=0)
