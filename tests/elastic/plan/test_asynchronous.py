"""Weights of what has come, by its age; who is late goes on where the others are."""

import pytest

from lightning_decentral.elastic.plan.asynchronous import Arrival
from lightning_decentral.gossip import Asynchronous, Complete, OnePeerExponential, Own, Ring, Topology
from lightning_decentral.gossip.plan.weights import neighbours


def arrivals(topology: Topology, size: int, rounds: dict[int, int], rank: int = 0) -> list[Arrival]:
    return [Arrival(j, r, neighbours(topology, Own(), rank, size, r)) for j, r in rounds.items()]


@pytest.mark.parametrize("topology", [Ring(), Complete(), OnePeerExponential()], ids=repr)
def test_in_time_it_is_the_graphs_row(topology: Topology) -> None:
    at = neighbours(topology, Own(), 0, 8, 2)
    assert Asynchronous().row(0, 2, arrivals(topology, 8, dict.fromkeys(at.sources, 2))) == pytest.approx(dict(at.row))


@pytest.mark.parametrize("damping", [0.0, 1.0, 3.0])
def test_a_late_message_counts_less_and_an_early_one_as_in_time(damping: float) -> None:
    row = Asynchronous(damping=damping).row(0, 10, arrivals(Ring(), 4, {1: 7, 3: 15}))
    assert row == pytest.approx({1: 1 / 3 / (1 + 3 * damping), 3: 1 / 3, 0: 1 - row[1] - row[3]})


def test_messages_of_several_rounds_weigh_together_what_one_rounds_do() -> None:
    """One peer in each round, of weight 1/2: the one of this round and the two before have come."""
    row = Asynchronous(damping=0.0).row(0, 2, arrivals(OnePeerExponential(), 8, {7: 0, 6: 1, 4: 2}))
    assert row == pytest.approx({0: 0.5, 7: 1 / 6, 6: 1 / 6, 4: 1 / 6})


def test_nothing_heard_is_nothing_mixed() -> None:
    assert Asynchronous().row(3, 5, []) == {3: 1.0}


@pytest.mark.parametrize(("newest", "next_round"), [(0, 10), (10, 10), (14, 10), (15, 15), (90, 90)])
def test_who_is_later_than_that_goes_on_in_the_newest_round(newest: int, next_round: int) -> None:
    assert Asynchronous(behind=4).next_round(10, newest) == next_round


@pytest.mark.parametrize("option", [{"damping": -0.1}, {"behind": -1}, {"damping": float("nan")}])
def test_no_less_than_nothing(option: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(option))} must be"):
        Asynchronous(**option)  # type: ignore[arg-type]
