"""Prices of groups that weren't measured, against the ring's closed forms."""

import pytest

from lightning_decentral.shared.plan.network import FREE, NO_NETWORK, Network
from lightning_decentral.shared.plan.profile import LinkCost
from tests.settings import links

MEASURED = Network(
    (
        LinkCost("all_reduce", "between", 4, 1, 6e-4, 1e9),
        LinkCost("all_reduce", "between", 8, 1, 2e-3, 8e8),
        LinkCost("exchange", "between", 8, 4, 1e-4, 3e8),
    )
)


def test_what_was_measured_is_taken_as_it_is() -> None:
    price = MEASURED.price("all_reduce", "between", 8)
    assert (price.seconds(8e8), price.extrapolated) == (pytest.approx(2e-3 + 1.0), False)


@pytest.mark.parametrize(("workers", "nearest"), [(5, 4), (6, 8), (64, 8)])
def test_other_sizes_are_scaled_as_a_ring_from_the_nearest(workers: int, nearest: int) -> None:
    latency, rate = {4: (6e-4, 1e9), 8: (2e-3, 8e8)}[nearest]
    price = MEASURED.price("all_reduce", "between", workers)
    hops = 2 * (workers - 1) / (2 * (nearest - 1))
    copies = (2 * (workers - 1) / workers) / (2 * (nearest - 1) / nearest)
    assert price.seconds(1e8) == pytest.approx(hops * latency + copies * 1e8 / rate)
    assert price.extrapolated


@pytest.mark.parametrize(("peers", "rate"), [(1, 1e9), (2, 8e8), (3, 5e8), (6, 5e8)])
def test_an_exchange_with_several_neighbours_is_that_with_as_many(peers: int, rate: float) -> None:
    rates = {1: 1e9, 2: 8e8, 3: 5e8}
    found = [LinkCost("exchange", "between", 8, 1, 1e-4, each, peers=n) for n, each in rates.items()]
    price = Network(tuple(found)).price("exchange", "between", 8, peers=peers)
    assert (price.bytes_per_second, price.extrapolated) == (rate, False)
    assert Network((found[0],)).price("exchange", "between", 8, peers=peers).extrapolated == (peers > 1)
    standing_in = Network(tuple(found[::-1])).price("all_gather", "between", 8, peers=peers)
    assert standing_in.bytes_per_second == pytest.approx(1e9 / (7 / 8)), "for another operation that with one"


def test_a_link_alone_gives_the_ring() -> None:
    price = links(latency=1e-3, rate=1e9).price("all_reduce", "between", 8)
    assert price.seconds(1e9) == pytest.approx(14e-3 + 14 / 8)
    gather = links(latency=1e-3, rate=1e9).price("all_gather", "between", 8)
    assert gather.seconds(1e9) == pytest.approx(7e-3 + 7 / 8)


def test_more_flows_share_the_card_and_fewer_are_not_faster() -> None:
    assert MEASURED.price("exchange", "between", 8, flows=8).seconds(1e9) == pytest.approx(1e-4 + 2e9 / 3e8)
    assert MEASURED.price("exchange", "between", 8, flows=1).seconds(1e9) == pytest.approx(1e-4 + 1e9 / 3e8)
    assert MEASURED.price("exchange", "between", 8, flows=1).extrapolated


def test_inside_a_node_falls_back_to_the_network_and_says_so() -> None:
    assert MEASURED.price("exchange", "inside", 8, flows=4).extrapolated
    inside_only = Network((LinkCost("exchange", "inside", 2, 1, 0, 1e9),))
    with pytest.raises(ValueError, match=r"nothing was measured between nodes: .*--bandwidth"):
        inside_only.price("exchange", "between", 2)


def test_groups_that_share_nodes_are_priced_by_such_groups() -> None:
    """The world of two nodes of four, and one worker of each of eight nodes: both are eight workers."""
    world = LinkCost("all_reduce", "between", 8, 1, 1e-3, 1e9, per_node=4)
    thin = LinkCost("all_reduce", "between", 8, 1, 2e-3, 2e9)
    both = Network((world, thin))
    for per_node, cost in ((4, world), (1, thin)):
        price = both.price("all_reduce", "between", 8, per_node=per_node)
        assert (price.seconds(1e9), price.extrapolated) == (cost.seconds(1e9), False)
    assert Network((thin,)).price("all_reduce", "between", 8, per_node=4).extrapolated


def test_nothing_costs_nothing() -> None:
    assert MEASURED.price("all_reduce", "between", 1) == FREE
    assert NO_NETWORK.price("all_reduce", "between", 64).seconds(1e12) == 0
    assert MEASURED.price("exchange", "between", 8, 4).seconds(0) == 0
