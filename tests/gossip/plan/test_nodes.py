"""Plans that know the nodes, and what they move through a node's network card."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_decentral.gossip import (
    AlternatingExponentialRing,
    Auto,
    BaseGraph,
    Complete,
    Every,
    Exponential,
    Hypercube,
    OnePeerExponential,
    Own,
    Ring,
    Topology,
)
from lightning_decentral.gossip.plan.checks import check
from lightning_decentral.gossip.plan.planned_traffic import all_reduce_copies, copies_through_card
from lightning_decentral.gossip.plan.topology.combined import prime_factors
from lightning_decentral.gossip.plan.weights import consensus_steps, describe, mixing_matrix

PLACES = [(nodes, per_node) for per_node in range(1, 65) for nodes in range(1, 64 // per_node + 1)]
LARGER = [(3, 64), (16, 8), (12, 16), (7, 32), (61, 2), (2, 64)]


def mean_over(members: list[int], size: int) -> np.ndarray:
    matrix = np.eye(size)
    matrix[members] = 0
    matrix[np.ix_(members, members)] = 1 / len(members)
    return matrix


@pytest.mark.parametrize("per_node", [1, 2, 4])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_half_of_the_pairs_of_nodes_average_over_both_the_others_inside(per_node: int, bits: int) -> None:
    """Against the definition, written over nodes: bit b of the node's number for steps 2b and 2b + 1."""
    nodes, topology = 2**bits, AlternatingExponentialRing(per_node)
    size = nodes * per_node
    assert topology.period(size) == 2 * bits
    talked: list[set[int]] = []
    for step in range(2 * bits):
        matrix, expected = mixing_matrix(topology, size, step), np.eye(size)
        across = [a for a in range(nodes) if matrix[a * per_node, (a ^ (1 << step // 2)) * per_node] > 0]
        for a in range(nodes):
            own = list(range(a * per_node, (a + 1) * per_node))
            pair = [r for b in sorted({a, a ^ (1 << step // 2)}) for r in range(b * per_node, (b + 1) * per_node)]
            expected[own] = mean_over(pair if a in across else own, size)[own]
        np.testing.assert_allclose(matrix, expected, atol=1e-15)
        talked.append(set(across))
    for first, second in zip(talked[::2], talked[1::2], strict=True):
        assert first | second == set(range(nodes))
        assert not first & second
        assert len(first) == nodes // 2 if nodes > 2 else len(first) in (0, 2)


@pytest.mark.parametrize("per_node", [1, 2, 3, 4])
@pytest.mark.parametrize("nodes", range(1, 17))
def test_alternating_exponential_ring_is_exact_after_its_period(nodes: int, per_node: int) -> None:
    topology, size = AlternatingExponentialRing(per_node), nodes * per_node
    check(topology, size)
    factors = prime_factors(nodes)
    assert math.prod(factors) == nodes
    assert topology.period(size) == max(1, 2 * len(factors))
    steps = [mixing_matrix(topology, size, step) for step in reversed(range(topology.period(size)))]
    np.testing.assert_allclose(np.linalg.multi_dot([*steps, np.eye(size)]), 1 / size, atol=1e-12)
    assert consensus_steps(topology, size) in ((0,) if size == 1 else range(1, topology.period(size) + 1))


def by_hand(topology: Topology, size: int, per_node: int, step: int) -> list[float]:
    """Copies that each node sends out: cliques of more than two by a ring over sorted members, others one by one."""
    matrix = mixing_matrix(topology, size, step)
    node = np.arange(size) // per_node
    sent = [0.0] * (size // per_node)
    for rank in range(size):
        heard_by = [i for i in range(size) if i != rank and matrix[i, rank] > 0]
        members = sorted([rank, *heard_by])
        if any_clique_of_three(topology, size):
            nodes_left = node[members[(members.index(rank) + 1) % len(members)]] != node[rank]
            sent[node[rank]] += 2 * (len(members) - 1) / len(members) * bool(nodes_left)
        else:
            sent[node[rank]] += sum(node[i] != node[rank] for i in heard_by)
    return sent


def any_clique_of_three(topology: Topology, size: int) -> bool:
    return isinstance(topology, AlternatingExponentialRing | Complete) and any(
        len(topology.sources(r, size, t)) > 1 for t in range(topology.period(size)) for r in range(size)
    )


@pytest.mark.parametrize("per_node", [1, 2, 4])
@pytest.mark.parametrize(
    "topology", [Hypercube(), BaseGraph(), Ring(), Complete(), Exponential(), OnePeerExponential()], ids=str
)
def test_copies_through_the_card_are_those_of_the_matrices(topology: Topology, per_node: int) -> None:
    for size in (4, 8, 16):
        counted = copies_through_card(topology, Own(), size, per_node)
        assert counted == pytest.approx(
            [max(by_hand(topology, size, per_node, step)) for step in range(topology.period(size))]
        )


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (4, 4), (8, 2), (4, 1)])
def test_bytes_of_the_table(nodes: int, per_node: int) -> None:
    """Facts of 2410.11998: flat one-peer L (log2 n - log2 L) / log2 n on average and L at peak; AER (2L - 1) / (2L)."""
    size, logs = nodes * per_node, int(math.log2(nodes * per_node))
    flat = copies_through_card(Hypercube(), Own(), size, per_node)
    assert max(flat) == per_node
    assert sum(flat) / len(flat) == pytest.approx(per_node * (logs - math.log2(per_node)) / logs)
    one = copies_through_card(AlternatingExponentialRing(per_node), Own(), size, per_node)
    ring = 2 * (2 * per_node - 1) / (2 * per_node)
    assert max(one) == pytest.approx(ring)
    assert all_reduce_copies(size, per_node) == 2 * (size - 1) / size


def each_node(topology: Topology, size: int, per_node: int) -> list[float]:
    """Mean over the period for every node."""
    rows = [by_hand(topology, size, per_node, step) for step in range(topology.period(size))]
    return [sum(column) / len(column) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (4, 2), (8, 2), (4, 4)])
def test_the_ring_moves_half_an_all_reduce_of_two_nodes_on_average(nodes: int, per_node: int) -> None:
    size = nodes * per_node
    average = each_node(AlternatingExponentialRing(per_node), size, per_node)
    assert average == pytest.approx([(2 * per_node - 1) / (2 * per_node)] * nodes)


@pytest.mark.sampled
@pytest.mark.parametrize("per_node", range(1, 65))
def test_auto_never_moves_more_through_a_card_than_all_reduce(per_node: int) -> None:
    """No step of any plan, for all sizes up to 64 workers and some larger ones."""
    for nodes in [n for n, p in [*PLACES, *LARGER] if p == per_node]:
        size = nodes * per_node
        topology = Auto().placed(per_node)
        assert max(copies_through_card(topology, Own(), size, per_node)) <= all_reduce_copies(size, per_node) + 1e-12


@given(st.sampled_from([place for place in PLACES if place[0] * place[1] <= 36]))
def test_auto_is_exact_on_every_cluster(place: tuple[int, int]) -> None:
    nodes, per_node = place
    size, topology = nodes * per_node, Auto(per_node)
    check(topology, size)
    assert consensus_steps(topology, size) is not None
    assert f"Auto -> {type(topology.pick(size)).__name__}" in describe(topology, size)


def test_a_plan_takes_the_nodes_that_it_was_not_given() -> None:
    assert Auto().placed(4) == Auto(workers_per_node=4)
    assert Auto(2).placed(4) == Auto(2)
    assert Every(3, Auto()).placed(4) == Every(3, Auto(4))
    assert Ring().placed(4) == Ring()
    assert Auto(8).pick(8) == Hypercube()
    assert Auto(8).pick(4) == Hypercube()
