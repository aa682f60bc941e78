"""Which groups are measured, by hand; the fitted line, against a search over all lines."""

import itertools

import numpy as np
import pytest

from lightning_decentral.planner.plan.probes import MOST_BYTES_PER_SECOND, Probe, fit, probes


def test_two_nodes_of_four() -> None:
    assert probes(8, 4) == [
        Probe("inside", ((0, 1),), 2),
        Probe("inside", ((0, 1), (2, 3)), 2),
        Probe("inside", ((0, 1, 2, 3),), 4),
        Probe("between", ((0, 4),), 1),
        Probe("between", ((0, 4), (1, 5), (2, 6), (3, 7)), 1),
        Probe("between", (tuple(range(8)),), 4),
    ]


def test_one_worker_a_node_and_one_node() -> None:
    assert [probe.groups for probe in probes(6, 1)] == [((0, 1),), ((0, 1, 2, 3),), ((0, 1, 2, 3, 4, 5),)]
    assert {probe.reach for probe in probes(6, 1)} == {"between"}
    assert [probe.groups for probe in probes(3, 3)] == [((0, 1),), ((0, 1, 2),)]
    assert str(probes(8, 4)[4]) == "between nodes, 4 flows of 2 workers"
    assert str(probes(8, 4)[2]) == "inside a node, 4 workers"


@pytest.mark.parametrize(("size", "per_node"), [(8, 4), (6, 3), (5, 5), (7, 1)])
def test_groups_of_a_probe_share_no_worker(size: int, per_node: int) -> None:
    for probe in probes(size, per_node):
        members = [rank for group in probe.groups for rank in group]
        assert len(set(members)) == len(members)
        assert set(members) <= set(range(size))
        for group in probe.groups:
            nodes = [rank // per_node for rank in group]
            assert (len(set(nodes)) == 1) == (probe.reach == "inside")
            assert {nodes.count(node) for node in nodes} == {probe.per_node}


@pytest.mark.parametrize(("size", "per_node", "message"), [
    (1, 1, "at least 2 workers"),
    (6, 4, "6 workers don't divide into nodes of 4"),
])  # fmt: skip
def test_impossible_worlds(size: int, per_node: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        probes(size, per_node)


SIZES = (1e3, 1e5, 1e6, 1e7)


def test_a_line_is_found_exactly() -> None:
    latency, rate, error = fit([(size, 2e-4 + size / 25e6) for size in SIZES])
    assert (latency, rate) == (pytest.approx(2e-4), pytest.approx(25e6))
    assert error < 1e-9


@pytest.mark.parametrize("seed", range(4))
def test_no_line_is_nearer(seed: int) -> None:
    random = np.random.default_rng(seed)
    points = [(size, float((random.choice([0, 1e-3]) + size / 1e8) * random.uniform(0.5, 2))) for size in SIZES]

    def distance(latency: float, rate: float) -> float:
        return sum((latency + size / rate - seconds) ** 2 / seconds for size, seconds in points)

    latency, rate, error = fit(points)
    assert latency >= 0
    assert rate > 0
    tried = itertools.product([0, *np.geomspace(1e-7, 1e-1, 60)], np.geomspace(1e6, 1e12, 120))
    assert distance(latency, rate) <= min(distance(*line) for line in tried) + 1e-12
    assert error == pytest.approx(max(abs((latency + x / rate) / y - 1) for x, y in points))


def test_small_messages_that_a_buffer_swallows_do_not_make_a_link_faster() -> None:
    """A token bucket of 128 kB before 25 MB/s."""
    points = [(size, 1.5e-3 + max(0.0, size - 128e3) / 25e6) for size in (65_536, 1_048_576, 8_388_608, 33_554_432)]
    assert fit(points)[1] == pytest.approx(25e6, rel=0.03)


def test_no_negative_latency_and_no_negative_rate() -> None:
    assert fit([(1e3, 1e-6), (1e6, 2e-3)])[0] == 0
    assert fit([(1e3, 2e-3), (1e6, 1e-3)])[1] == pytest.approx(MOST_BYTES_PER_SECOND)
    assert fit([(1e3, 2e-3)])[2] < 1e-9
