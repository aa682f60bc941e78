"""Weights, how fast they mix against closed forms, and what `check` refuses."""

import math
import time
from dataclasses import dataclass

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_decentral.gossip import (
    Auto,
    Complete,
    Dyadic,
    Every,
    Exponential,
    FromGraph,
    MetropolisHastings,
    OnePeerExponential,
    OnePeerRing,
    OutDegree,
    Own,
    RandomMatching,
    Ring,
    Star,
    Topology,
    Torus,
    Uniform,
    Weights,
)
from lightning_decentral.gossip.plan.checks import check, check_equals
from lightning_decentral.gossip.plan.planned_traffic import mean_copies, partitions, rounds
from lightning_decentral.gossip.plan.topology.topology import step_graph
from lightning_decentral.gossip.plan.weights import consensus_steps, describe, gap_per_step, mixing_matrix, spectral_gap
from tests.gossip.topologies import every_topology, instances, serves


def second_eigenvalue(matrix: np.ndarray) -> float:
    """Independent of eigenvalue order: without the mean, W - 1 1^T / n has the rest of the spectrum and a 0."""
    return float(np.abs(np.linalg.eigvals(matrix - 1 / len(matrix))).max())


# ---- closed forms ---------------------------------------------------------------------------------------------------


@given(st.integers(3, 60))
def test_second_eigenvalue_of_a_ring(size: int) -> None:
    smallest = 1 / 3 + 2 / 3 * math.cos(2 * math.pi / size * (size // 2))
    expected = max(1 / 3 + 2 / 3 * math.cos(2 * math.pi / size), -smallest)
    assert 1 - spectral_gap(mixing_matrix(Ring(), size, 0)) == pytest.approx(expected, abs=1e-9)


@given(st.integers(1, 40).map(lambda half: 2 * half))
def test_second_eigenvalue_of_exponential(size: int) -> None:
    rho = 1 - 2 / (1 + math.ceil(math.log2(size)))
    assert 1 - spectral_gap(mixing_matrix(Exponential(), size, 0)) == pytest.approx(rho, abs=1e-9)


@pytest.mark.parametrize("size", [2, 3, 8, 15])
def test_complete_and_star(size: int) -> None:
    np.testing.assert_allclose(mixing_matrix(Complete(), size, 0), 1 / size, atol=1e-15)
    assert spectral_gap(mixing_matrix(Complete(), size, 0)) == pytest.approx(1)
    # I - L / n with the Laplacian of a star, whose eigenvalues are 0, 1 (n - 2 times) and n.
    assert spectral_gap(mixing_matrix(Star(), size, 0)) == pytest.approx(1 / size if size > 2 else 1)


@given(st.sampled_from(every_topology(range(2, 14))), st.integers(0, 100))
def test_spectral_gap_by_deflation(plan: tuple[Topology, int], step: int) -> None:
    matrix = mixing_matrix(*plan, step)
    assert spectral_gap(matrix) == pytest.approx(1 - second_eigenvalue(matrix), abs=1e-7)


def test_spectral_gap_of_separate_groups_is_zero_and_of_one_worker_one() -> None:
    assert spectral_gap(mixing_matrix(OnePeerRing(), 6, 0)) == pytest.approx(0, abs=1e-12)
    assert spectral_gap(np.eye(1)) == 1


def test_gap_per_step() -> None:
    assert gap_per_step(Ring(), 7) == pytest.approx(spectral_gap(mixing_matrix(Ring(), 7, 0)))
    assert gap_per_step(Every(2, Ring()), 7) == pytest.approx(1 - math.sqrt(1 - gap_per_step(Ring(), 7)))
    rotating = mixing_matrix(OnePeerRing(), 6, 1) @ mixing_matrix(OnePeerRing(), 6, 0)
    assert gap_per_step(OnePeerRing(), 6) == pytest.approx(1 - math.sqrt(second_eigenvalue(rotating)))


def test_what_only_comes_close_is_not_exact_consensus() -> None:
    assert consensus_steps(RandomMatching(), 64) is None
    assert consensus_steps(OnePeerExponential(), 6) is None
    assert consensus_steps(Ring(), 3) == 1


# ---- weights --------------------------------------------------------------------------------------------------------


@given(st.integers(2, 12), st.integers(0, 200))
def test_metropolis_hastings_by_its_formula_on_any_graph(size: int, seed: int) -> None:
    graph = nx.gnp_random_graph(size, 0.5, seed=seed)
    matrix = mixing_matrix(FromGraph(graph), size, 0, MetropolisHastings())
    expected = np.zeros((size, size))
    for i, j in graph.edges:
        expected[i, j] = expected[j, i] = 1 / (1 + max(graph.degree[i], graph.degree[j]))
    expected += np.diag(1 - expected.sum(1))
    np.testing.assert_allclose(matrix, expected, atol=1e-15)
    np.testing.assert_allclose(mixing_matrix(FromGraph(graph), size, 0, Own()), expected, atol=1e-15)


@given(st.integers(2, 12), st.integers(0, 200))
def test_uniform_is_the_mean_of_what_is_heard(size: int, seed: int) -> None:
    graph = nx.gnp_random_graph(size, 0.5, seed=seed, directed=True)
    x = np.random.default_rng(seed).normal(size=size)
    mixed = mixing_matrix(FromGraph(graph), size, 0, Uniform()) @ x
    assert mixed == pytest.approx([np.mean(x[[i, *graph.predecessors(i)]]) for i in range(size)])


@pytest.mark.parametrize(
    "topology", [Complete(), Ring(), Exponential(), OnePeerExponential(), Auto(), Torus()], ids=str
)
def test_uniform_is_sound_where_degrees_are_equal(topology: Topology) -> None:
    check(topology, 16, Uniform())


# ---- check ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scaled(Weights):
    """Own weights, one of them changed."""

    times: float = 1.0
    more: float = 0.0

    def row(self, topology: Topology, rank: int, size: int, step: int) -> dict[int, float]:
        row = topology.row(rank, size, step)
        source = min(row.keys() - {rank})
        return {**row, source: row[source] * self.times, rank: row[rank] + self.more}


@dataclass(frozen=True)
class Stranger(Weights):
    def row(self, topology: Topology, rank: int, size: int, step: int) -> dict[int, float]:
        return {rank: 0.5, (rank + 2) % size: 0.5}


@dataclass(frozen=True)
class Careless(Topology):
    heard: tuple[int, ...]

    def sources(self, rank: int, size: int, step: int) -> tuple[int, ...]:
        return self.heard


@dataclass(frozen=True)
class Swap(Weights):
    """Symmetric and summing to one, but negative."""

    def row(self, topology: Topology, rank: int, size: int, step: int) -> dict[int, float]:
        return {1 - rank: 1.5, rank: -0.5}


class Keeping(Weights):
    """A plain class, as a user may write it, without a dataclass's fields."""

    def __init__(self, own: float) -> None:
        self.own = own

    def row(self, topology: Topology, rank: int, size: int, step: int) -> dict[int, float]:
        sources = topology.sources(rank, size, step)
        return {rank: self.own, **dict.fromkeys(sources, (1 - self.own) / len(sources))}


class KeepingEqual(Keeping):
    """Equal to its like, and unhashable with that."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keeping)


class Reaching(Topology):
    def __init__(self, distance: int) -> None:
        self.distance = distance

    def sources(self, rank: int, size: int, step: int) -> tuple[int, ...]:
        return ((rank + self.distance) % size,)


@pytest.mark.parametrize("kind", [Keeping, KeepingEqual])
def test_two_plans_of_one_plain_class_are_two_plans(kind: type[Keeping]) -> None:
    mean, lazy, wrong = kind(1 / 3), kind(0.5), kind(2.0)
    assert partitions(Ring(), mean, 3) == (((0, 1, 2),),)
    assert partitions(Ring(), lazy, 3) is None
    assert (mean_copies(Ring(), mean, 3, 1), mean_copies(Ring(), lazy, 3, 1)) == (4 / 3, 2)
    check(Ring(), 3, mean)
    check_equals("rule", Ring(), 3, mean)
    with pytest.raises(ValueError, match="weights must not be negative"):
        check(Ring(), 3, wrong)
    with pytest.raises(ValueError, match="rule averages all workers equally"):
        check_equals("rule", Ring(), 3, lazy)


def test_what_is_kept_of_a_plan_is_not_that_of_another_of_its_class() -> None:
    assert [rounds(Ring(), Keeping(own), 3, 1)[0].loads[0].clique for own in (1 / 3, 0.5)] == [3, 0]
    assert [consensus_steps(Ring(), 3, Keeping(own)) for own in (1 / 3, 0.5)] == [1, None]
    assert [step_graph(Reaching(distance), 5, 0).sources[0] for distance in (1, 2)] == [(1,), (2,)]


ISLANDS = FromGraph(nx.disjoint_union(nx.complete_graph(2), nx.complete_graph(2)))
ONE_WAY = FromGraph(nx.DiGraph([(0, 1), (1, 0), (1, 2), (2, 3), (3, 2)]))


@pytest.mark.parametrize(
    ("topology", "size", "weights", "said"),
    [
        (Ring(), 5, Scaled(times=1.3), r"worker 0 at step 0 sum to 1\.1: they must sum to 1"),
        (Ring(), 5, Scaled(more=-0.3), r"worker 0 at step 0 sum to 0\.7: they must sum to 1"),
        (Ring(), 5, Scaled(more=float("nan")), r"worker 0 at step 0 sum to nan: they must sum to 1"),
        (Complete(), 2, Swap(), r"worker 0 at step 0 include -0\.5: weights must not be negative"),
        (Ring(), 5, Stranger(), r"worker 0 at step 0 are for \[0, 2\]: give one for each of \[0, 1, 4\]"),
        (Star(), 4, Uniform(), r"given to worker 0 at step 0 sum to 1\.75, so the mean would drift: use weights=Metro"),
        (ONE_WAY, 4, Own(), r"so the mean would drift: use weights=MetropolisHastings"),
        (ISLANDS, 4, Own(), r"workers \{0, 1\} never receive from \{2, 3\}.*: add edges between them, or use Auto"),
        (Every(3, ISLANDS), 4, Own(), r"workers \{0, 1\} never receive from \{2, 3\}"),
        (Careless((0,)), 3, Own(), r"sources of worker 0 at step 0 are \(0,\): return other workers of 0\.\.2, sorted"),
        (Careless((2, 1)), 3, Own(), r"sources of worker 0 at step 0 are \(2, 1\): return"),
        (Careless((3,)), 3, Own(), r"sources of worker 0 at step 0 are \(3,\): return"),
        (FromGraph(nx.empty_graph(20)), 20, Own(), r"\{0\} never receive from \{1, 2, 3, 4, 5, 6, 7, 8, \.\.\.\}"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_check_refuses_in_one_line_with_value_and_remedy(
    topology: Topology, size: int, weights: Weights, said: str
) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        check(topology, size, weights)
    assert "\n" not in str(caught.value)


@dataclass(frozen=True)
class Late(Topology):
    """Silent until step 16, later than sums are checked; then one worker hears the other, one way."""

    deaf: int

    def period(self, size: int) -> int:
        return 17

    def sources(self, rank: int, size: int, step: int) -> tuple[int, ...]:
        return (1 - rank,) if step % 17 == 16 and rank != self.deaf else ()


@pytest.mark.parametrize("deaf", [0, 1])
def test_check_sees_one_way_hearing_in_both_directions(deaf: int) -> None:
    with pytest.raises(ValueError, match=rf"workers \{{{deaf}\}} never receive from \{{{1 - deaf}\}}"):
        check(Late(deaf), 2)


@given(st.integers(2, 8), st.integers(0, 300))
def test_check_accepts_exactly_the_connected_graphs(size: int, seed: int) -> None:
    graph = nx.gnp_random_graph(size, 0.35, seed=seed)
    if nx.is_connected(graph):
        check(FromGraph(graph), size)
    else:
        with pytest.raises(ValueError, match="never receive from"):
            check(FromGraph(graph), size)


@given(st.integers(3, 8), st.integers(0, 300))
def test_check_accepts_exactly_the_balanced_directed_graphs(size: int, seed: int) -> None:
    graph = nx.gnp_random_graph(size, 0.5, seed=seed, directed=True)
    cycle = nx.DiGraph([(i, (i + 1) % size) for i in range(size)])
    balanced = all(graph.in_degree[i] == graph.out_degree[i] for i in graph)
    symmetric = all(graph.has_edge(v, u) for u, v in graph.edges)
    check(FromGraph(cycle), size)
    if balanced and nx.is_strongly_connected(graph):
        check(FromGraph(graph), size)
    else:
        with pytest.raises(ValueError, match="never receive from" if balanced or symmetric else "mean would drift"):
            check(FromGraph(graph), size)


@pytest.mark.parametrize("topology", [t for t in instances() if serves(t, 64)], ids=str)
def test_check_of_64_workers_is_fast(topology: Topology) -> None:
    """50 ms on a free core; the best of five runs, and room for a busy one."""
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        check(topology, 64)
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.2


# ---- words ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topology", "size", "said"),
    [
        (Auto(), 4, "Auto -> Hypercube, exact consensus every 2 steps"),
        (Auto(), 6, "Auto -> BaseGraph(max_degree=1), exact consensus every 4 steps"),
        (Complete(), 3, "Complete, exact consensus every step"),
        (Ring(), 6, "Ring, spectral gap 0.33"),
        (OnePeerRing(), 6, "OnePeerRing, spectral gap 0.5 per step"),
        (Every(8, Auto()), 4, "Auto -> Hypercube every 8 steps, exact consensus every 16 steps"),
        (Torus(), 12, "Torus 3 x 4, spectral gap 0.4"),
        (FromGraph(nx.path_graph(3)), 3, "FromGraph with 4 directed edges, spectral gap 0.33"),
        (Ring(), 1, "Ring, one worker without neighbours"),
    ],
    ids=str,
)
def test_describe(topology: Topology, size: int, said: str) -> None:
    assert describe(topology, size) == said


@pytest.mark.parametrize(("topology", "size"), every_topology(range(2, 8)), ids=str)
def test_out_degree_gives_away_all_and_dyadic_hears_in_powers_of_two(topology: Topology, size: int) -> None:
    for step in range(min(topology.period(size), 8)):
        np.testing.assert_allclose(mixing_matrix(topology, size, step, OutDegree()).sum(0), 1, atol=1e-15)
        matrix = mixing_matrix(topology, size, step, Dyadic())
        assert (matrix.sum(1) == 1).all()
        off = matrix[~np.eye(size, dtype=bool)]
        assert set(np.frexp(off[off > 0])[0]) <= {0.5}
        assert (np.diagonal(matrix) > 0).all()
