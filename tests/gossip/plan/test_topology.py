"""Laws that every topology keeps, on every size it serves, and the closed forms of each."""

import math
import pickle

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_decentral.gossip import (
    AlternatingExponentialRing,
    Auto,
    BaseGraph,
    Complete,
    Every,
    Exponential,
    FromGraph,
    Hypercube,
    OnePeerExponential,
    OnePeerRing,
    PeriodicAverage,
    RandomMatching,
    Ring,
    Star,
    Stream,
    Topology,
    Torus,
)
from lightning_decentral.gossip.plan.checks import check
from lightning_decentral.gossip.plan.topology.one_peer import base_graph
from lightning_decentral.gossip.plan.topology.topology import step_graph
from lightning_decentral.gossip.plan.weights import consensus_steps, describe, mixing_matrix
from tests.gossip.topologies import classes, directed_circulant, every_topology, instances, serves

PLANS = every_topology(range(1, 17))
some_plan = st.sampled_from(PLANS)
some_step = st.integers(0, 10_000)


def product(topology: Topology, size: int, steps: int, start: int = 0) -> np.ndarray:
    return np.linalg.multi_dot(
        [np.eye(size), *(mixing_matrix(topology, size, start + t) for t in reversed(range(steps)))]
    )


# ---- laws of all ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("topology", "size"), PLANS, ids=str)
def test_every_plan_is_sound(topology: Topology, size: int) -> None:
    check(topology, size)


@given(some_plan, some_step)
def test_sources_are_sorted_others_and_repeat_after_a_period(plan: tuple[Topology, int], step: int) -> None:
    topology, size = plan
    for rank in range(size):
        sources = topology.sources(rank, size, step)
        assert list(sources) == sorted(set(sources) & set(range(size)) - {rank})
        assert sources == topology.sources(rank, size, step + topology.period(size))


@given(some_plan, some_step)
def test_rows_belong_to_sources_and_the_matrix_is_doubly_stochastic(plan: tuple[Topology, int], step: int) -> None:
    topology, size = plan
    matrix = mixing_matrix(topology, size, step)
    heard = [set(np.flatnonzero(row)) - {rank} for rank, row in enumerate(matrix)]
    assert heard == [set(topology.sources(rank, size, step)) for rank in range(size)]
    assert matrix.min() >= 0
    np.testing.assert_allclose(matrix.sum(0), 1, atol=1e-12)
    np.testing.assert_allclose(matrix.sum(1), 1, atol=1e-12)


@given(some_plan, some_step)
def test_targets_are_the_other_end_of_sources(plan: tuple[Topology, int], step: int) -> None:
    topology, size = plan
    by_sources = {(j, i) for i in range(size) for j in topology.sources(i, size, step)}
    assert by_sources == {(j, i) for j in range(size) for i in step_graph(topology, size, step).targets[j]}


@given(some_plan)
def test_mixing_brings_the_workers_together(plan: tuple[Topology, int]) -> None:
    topology, size = plan
    x = np.random.default_rng(size).normal(size=(size, 3))
    for step in range(60 * topology.period(size) if topology.period(size) < 20 else 300):
        x_next = mixing_matrix(topology, size, step) @ x
        assert np.linalg.norm(x_next - x_next.mean(0)) <= np.linalg.norm(x - x.mean(0)) * (1 + 1e-12) + 1e-12
        x = x_next
    assert np.abs(x - x.mean(0)).max() < 0.2


@pytest.mark.parametrize("topology", instances(), ids=str)
def test_a_topology_is_a_value(topology: Topology) -> None:
    """Spawned workers get a pickled copy; caches need hash and equality."""
    copy = pickle.loads(pickle.dumps(topology))
    assert copy == topology
    assert hash(copy) == hash(topology)
    assert len({*instances(), topology}) == len(list(instances()))


@pytest.mark.parametrize("cls", classes(), ids=lambda cls: cls.__name__)
def test_every_size_is_served_or_refused_with_the_value(cls: type[Topology]) -> None:
    for topology in (t for t in instances() if type(t) is cls):
        for size in range(34):
            if serves(topology, size):
                assert size >= 1
                assert topology.period(size) >= 1
            else:
                with pytest.raises(ValueError, match=rf"(?s)\A[^\n]*\b{size}\b[^\n]*: [^\n]+\Z"):
                    topology.period(size)


@pytest.mark.parametrize(("topology", "size"), every_topology(range(1, 2)), ids=str)
def test_one_worker_hears_nobody(topology: Topology, size: int) -> None:
    assert [topology.sources(0, 1, step) for step in range(4)] == [()] * 4
    assert [topology.row(0, 1, step) for step in range(4)] == [{0: 1.0}] * 4
    assert topology.period(1) == (topology.steps if isinstance(topology, (Every, Stream)) else 1)


# ---- each -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 4, 7, 10])
def test_static_graphs_are_those_of_networkx(size: int) -> None:
    graphs = {
        Complete(): nx.complete_graph(size),
        Ring(): nx.cycle_graph(size),
        Star(): nx.star_graph(size - 1),
        Torus(rows=2, columns=size): nx.convert_node_labels_to_integers(
            nx.grid_2d_graph(2, size, periodic=True), ordering="sorted"
        ),
    }
    for topology, graph in graphs.items():
        heard = [topology.sources(rank, len(graph), 0) for rank in range(len(graph))]
        assert heard == [tuple(sorted(graph[rank])) for rank in range(len(graph))]


@pytest.mark.parametrize(
    ("size", "shape"), [(1, (1, 1)), (2, (1, 2)), (4, (2, 2)), (12, (3, 4)), (16, (4, 4)), (24, (4, 6))]
)
def test_torus_is_as_square_as_possible(size: int, shape: tuple[int, int]) -> None:
    assert Torus().label(size).startswith(f"Torus {shape[0]} x {shape[1]}")
    square = Torus(rows=shape[0], columns=shape[1])
    assert [Torus().sources(r, size, 0) for r in range(size)] == [square.sources(r, size, 0) for r in range(size)]


def test_torus_of_a_prime_is_a_ring_and_says_so() -> None:
    np.testing.assert_array_equal(mixing_matrix(Torus(), 7, 0), mixing_matrix(Ring(), 7, 0))
    assert "1 x 7 (a ring)" in describe(Torus(), 7)


@given(st.integers(2, 70), st.integers(0, 200))
def test_one_peer_exponential_takes_the_edges_of_exponential_in_turn(size: int, step: int) -> None:
    period = math.ceil(math.log2(size))
    assert OnePeerExponential().period(size) == period
    for rank in range(size):
        assert OnePeerExponential().sources(rank, size, step) == ((rank - 2 ** (step % period)) % size,)
        turns = {OnePeerExponential().sources(rank, size, t)[0] for t in range(period)}
        assert turns == set(Exponential().sources(rank, size, step))


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("topology", [OnePeerExponential(), Hypercube(), Auto(), BaseGraph()], ids=str)
def test_exact_consensus_in_log2_steps_from_any_step_on(topology: Topology, size: int) -> None:
    steps = int(math.log2(size))
    assert consensus_steps(topology, size) == steps
    for start in range(steps):
        np.testing.assert_allclose(product(topology, size, steps, start), 1 / size, atol=1e-14)


@pytest.mark.parametrize("size", range(2, 25))
def test_one_peer_ring_takes_every_edge_of_the_ring(size: int) -> None:
    period = OnePeerRing().period(size)
    assert period == (1 if size == 2 else 2 if size % 2 == 0 else size)
    heard = [[OnePeerRing().sources(r, size, t) for t in range(period)] for r in range(size)]
    assert [tuple(sorted({j for s in steps for j in s})) for steps in heard] == [
        Ring().sources(r, size, 0) for r in range(size)
    ]
    assert sum(s == () for steps in heard for s in steps) == (period if size % 2 else 0)
    assert (consensus_steps(OnePeerRing(), size) is not None) == (size in (2, 4))


@pytest.mark.parametrize("max_degree", [1, 2, 3, 4])
def test_base_graph_is_exact_for_every_size_within_its_bounds(max_degree: int) -> None:
    for size in range(1, 41):
        topology = BaseGraph(max_degree)
        period = topology.period(size)
        assert period <= 2 * math.log(size, max_degree + 1) + 2
        assert max(len(topology.sources(r, size, t)) for r in range(size) for t in range(period)) <= max_degree
        np.testing.assert_allclose(product(topology, size, period), 1 / size, atol=1e-12)
        assert consensus_steps(topology, size) == (period if size > 1 else 0)


@settings(max_examples=20, deadline=None)
@given(st.integers(41, 130), st.integers(1, 7))
def test_base_graph_is_exact_for_larger_sizes(size: int, max_degree: int) -> None:
    assert len(base_graph(size, max_degree)) <= 2 * math.log(size, max_degree + 1) + 2
    np.testing.assert_allclose(
        product(BaseGraph(max_degree), size, len(base_graph(size, max_degree))), 1 / size, atol=1e-12
    )


def test_base_graph_has_the_lengths_of_its_algorithms() -> None:
    """By hand, one peer: 5 = 4 + 1 takes 2 + 1 + 2 steps, 7 = 4 + 2 + 1 as many, 6 = 2 * 3 takes 3 + 1, 8 takes 3."""
    assert [len(base_graph(size, 1)) for size in (5, 6, 7, 8)] == [5, 4, 5, 3]


@pytest.mark.parametrize("size", range(1, 41))
def test_auto_is_exact_for_every_size_with_one_peer(size: int) -> None:
    check(Auto(), size)
    period = Auto().period(size)
    assert consensus_steps(Auto(), size) == (0 if size == 1 else period)
    assert all(len(Auto().sources(r, size, t)) <= 1 for r in range(size) for t in range(period))
    assert f"Auto -> {type(Auto().pick(size)).__name__}" in describe(Auto(), size)


@given(st.integers(3, 40), st.integers(0, 5), some_step)
def test_random_matching_is_a_matching_that_the_seed_fixes(size: int, seed: int, step: int) -> None:
    topology = RandomMatching(seed=seed, rounds=16)
    pairs = {frozenset((r, *topology.sources(r, size, step))) for r in range(size)}
    assert sorted(map(len, pairs)) == [1] * (size % 2) + [2] * (size // 2)
    others = RandomMatching(seed=seed + 1, rounds=16)
    assert [topology.sources(r, size, t) for r in range(size) for t in range(16)] != [
        others.sources(r, size, t) for r in range(size) for t in range(16)
    ]


def test_random_matching_draws_what_it_always_drew() -> None:
    """Recorded: another sequence would make resumed runs continue on another graph."""
    assert [RandomMatching().sources(0, 8, step) for step in range(8)] == [(j,) for j in (1, 5, 7, 7, 5, 2, 5, 4)]


@given(st.integers(1, 6), st.sampled_from([Ring(), OnePeerExponential(), BaseGraph(), Star()]), some_step)
def test_every_is_silent_but_for_one_step_in_so_many(steps: int, inner: Topology, step: int) -> None:
    size, topology = 6, Every(steps, inner)
    assert topology.period(size) == steps * inner.period(size)
    matrix = mixing_matrix(topology, size, step)
    talks = step % steps == steps - 1
    np.testing.assert_array_equal(matrix, mixing_matrix(inner, size, step // steps) if talks else np.eye(size))


def test_every_takes_so_many_times_longer_to_consensus() -> None:
    assert consensus_steps(Every(8, Complete()), 5) == 8
    assert consensus_steps(Every(3, Auto()), 6) == 3 * Auto().period(6)


# ---- any graph ------------------------------------------------------------------------------------------------------


@given(st.integers(2, 12), st.integers(0, 100))
def test_from_graph_hears_along_the_edges(size: int, seed: int) -> None:
    graph = nx.gnp_random_graph(size, 0.4, seed=seed, directed=seed % 2 == 0)
    topology = FromGraph(graph)
    predecessors = graph.predecessors if graph.is_directed() else graph.neighbors
    assert [topology.sources(r, size, 0) for r in range(size)] == [tuple(sorted(predecessors(r))) for r in range(size)]


def test_from_graph_numbers_nodes_in_sorted_order_and_drops_loops() -> None:
    graph = nx.MultiDiGraph([("c", "a"), ("c", "a"), ("a", "b"), ("b", "c"), ("b", "b")])
    assert [FromGraph(graph).sources(rank, 3, 0) for rank in range(3)] == [(2,), (0,), (1,)]


def test_from_graph_takes_edges_as_a_configuration_writes_them() -> None:
    assert FromGraph(edges=[[0, 1], [1, 2]]) == FromGraph(nx.path_graph(3))


def test_directed_weights_are_those_of_the_largest_degree() -> None:
    graph = directed_circulant(6, [1, 2])
    np.testing.assert_allclose(mixing_matrix(FromGraph(graph), 6, 0), (np.eye(6) + nx.to_numpy_array(graph).T) / 3)


# ---- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Hypercube().period(6), "Hypercube needs a power of two workers, got 6: use BaseGraph"),
        (lambda: Torus(rows=2).period(5), "Torus.rows=2, columns=None. doesn't fit 5 workers: leave out rows"),
        (lambda: Torus(rows=0), "rows must be at least 1, got 0: leave out rows and columns"),
        (lambda: Torus(rows=2, columns=3).period(8), "doesn't fit 8 workers"),
        (lambda: BaseGraph(0), "max_degree must be at least 1, got 0: "),
        (lambda: RandomMatching(rounds=0), "rounds must be at least 1, got 0: "),
        (lambda: Every(0, Ring()), "steps must be at least 1, got 0: "),
        (lambda: Ring().period(0), "number of workers must be at least 1, got 0: "),
        (lambda: AlternatingExponentialRing(0), "workers_per_node must be at least 1, got 0: "),
        (lambda: AlternatingExponentialRing(4).period(6), "has 4 workers on each node, got 6 workers: make"),
        (lambda: Auto(4).period(6), "has 4 workers on each node, got 6 workers: make"),
        (lambda: FromGraph(nx.path_graph(3)).period(4), "has 3 nodes, got 4 workers: give a graph with 4 nodes"),
        (lambda: FromGraph(), "got neither: give one"),
        (lambda: FromGraph(nx.path_graph(3), edges=[[0, 1]]), "got both: give one"),
        (lambda: FromGraph(nx.Graph([("a", 1)])), "convert_node_labels_to_integers"),
    ],
)
def test_bad_input_is_refused_with_the_remedy(make: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()  # type: ignore[operator]


def test_an_inner_topology_learns_the_workers_per_node() -> None:
    for wrap in (Every, PeriodicAverage):
        assert wrap(8, Auto()).placed(4) == wrap(8, Auto(4))
