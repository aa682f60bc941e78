"""Assignments of depths to devices against the formulas and brute force; cycles against the timeline."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_decentral.sweep.plan.gangs import (
    ComplementaryPairing,
    ExactGangs,
    Gang,
    GreedyGangs,
    LatinSquare,
    Pairing,
    Turns,
    Unaware,
    lower_bound_seconds,
    ordered,
    staircase,
)

FAST = (Unaware(), ComplementaryPairing(), LatinSquare(), GreedyGangs())
EIGHTHS = st.integers(0, 40).map(lambda n: n / 8)


@st.composite
def gangs(draw: st.DrawFn, jobs: int = 4, devices: int = 4, iterations: int = 4) -> list[Gang]:
    size = draw(st.integers(1, devices))
    pieces = st.lists(EIGHTHS, min_size=size, max_size=size).map(tuple)
    found = draw(st.lists(st.tuples(pieces, st.integers(1, iterations)), min_size=1, max_size=jobs))
    return [Gang(str(j), *parts) for j, parts in enumerate(found)]


def best_cycle(found: list[Gang]) -> float:
    """Of all assignments; the first job's pieces stay where they are."""
    rows = [list(itertools.permutations(gang.seconds)) for gang in found]
    return min(max(map(sum, zip(*rest, strict=True))) for rest in itertools.product(rows[0][:1], *rows[1:]))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    "pairing", [ComplementaryPairing(), GreedyGangs(), ExactGangs()], ids=lambda p: type(p).__name__
)
def test_two_complementary_jobs(pairing: Pairing, n: int) -> None:
    forward, backward = 1.0, 2.0
    turns = pairing.turns([staircase(name, forward, backward, n) for name in "ab"])
    assert turns.cycle_seconds == pytest.approx(2 * forward + backward * (n + 1) / n)
    assert turns.unaware_seconds == 2 * (forward + backward)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_a_latin_square_of_jobs(n: int) -> None:
    turns = LatinSquare().turns([staircase(str(j), 1.0, 2.0, n) for j in range(n)])
    assert turns.cycle_seconds == pytest.approx(2 * n + 1)
    assert turns.unaware_seconds == 3 * n
    assert all(sorted(row) == list(range(n)) for row in (*turns.pieces, *zip(*turns.pieces, strict=True)))


@given(gangs(), st.sampled_from(FAST))
def test_assignments_are_permutations_and_not_under_the_bound(found: list[Gang], pairing: Pairing) -> None:
    turns = pairing.turns(found)
    assert all(sorted(row) == list(range(turns.devices)) for row in turns.pieces)
    assert turns.cycle_seconds >= lower_bound_seconds(found) - 1e-12
    assert turns.cycle_seconds <= turns.unaware_seconds


@given(gangs(), st.sampled_from(FAST))
def test_a_period_of_the_largest_sum_is_kept(found: list[Gang], pairing: Pairing) -> None:
    """n iterations of each job take at most n cycles, and no fewer than the busiest device's work."""
    turns = pairing.turns([Gang(gang.name, gang.seconds, 5) for gang in found])
    assert max(turns.completion_seconds().values()) == pytest.approx(5 * turns.cycle_seconds)


@settings(max_examples=25, deadline=None)
@given(gangs(jobs=3, devices=3))
def test_the_exact_assignment_is_the_best_of_all(found: list[Gang]) -> None:
    best = best_cycle(found)
    assert ExactGangs().turns(found).cycle_seconds == pytest.approx(best)
    assert all(pairing.turns(found).cycle_seconds >= best for pairing in FAST)


@given(gangs(jobs=2))
def test_complementary_is_exact_for_two(found: list[Gang]) -> None:
    assert ComplementaryPairing().turns(found).cycle_seconds == best_cycle(found)


def ends(turns: Turns, orders: tuple[tuple[int, ...], ...]) -> float:
    """Mean completion time of one iteration of each job, every device in an order of its own."""
    finish = [0.0] * len(turns.gangs)
    for device, order in enumerate(orders):
        now = 0.0
        for job in order:
            now += turns.seconds(job, device)
            finish[job] = max(finish[job], now)
    return sum(finish) / len(finish)


@settings(max_examples=40, deadline=None)
@given(gangs(jobs=3, devices=3, iterations=1))
def test_one_order_for_all_devices_is_as_good_as_any(found: list[Gang]) -> None:
    turns = GreedyGangs().turns(found)
    every = itertools.product(itertools.permutations(range(len(found))), repeat=turns.devices)
    best = min(ends(turns, orders) for orders in every)
    assert ordered(turns).mean_completion_seconds() == pytest.approx(best)


def test_of_many_jobs_the_shortest_goes_first() -> None:
    found = [Gang(str(j), (1.0, 1.0), iterations=9 - j) for j in range(8)]
    assert ordered(LatinSquare().turns(found)).order == (7, 6, 5, 4, 3, 2, 1, 0)


def test_a_job_that_is_through_leaves_its_turns() -> None:
    turns = ComplementaryPairing().turns([Gang("a", (2.0, 3.0), 2), Gang("b", (2.0, 3.0), 4)])
    assert turns.completion_seconds() == {"a": 8.0, "b": 2 * 5.0 + 2 * 3.0}
    assert turns.mean_completion_seconds() == 12


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        ([], "one or more of different names"),
        ([("a", (1.0,)), ("a", (1.0,))], "different names, got"),
        ([("a", (1.0,)), ("b", (1.0, 2.0))], "equally many pieces"),
        ([("a", ())], "job a must have pieces"),
        ([("a", (math.inf,))], "job a must have pieces"),
        ([("a", (1.0,), 0)], "1 or more iterations, got 0"),
    ],
)
def test_mistakes_name_the_value(jobs: list[tuple[str, tuple[float, ...]]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GreedyGangs().turns([Gang(*job) for job in jobs])
