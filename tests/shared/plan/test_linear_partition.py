"""The partition against brute force over every way to cut."""

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightning_decentral.shared.plan.linear_partition import Costs, linear_partition, piece_sums

SIZES = st.lists(st.integers(0, 20).map(float), min_size=1, max_size=7)


def ways(blocks: int, pieces: int) -> list[tuple[int, ...]]:
    inner = itertools.combinations(range(1, blocks), pieces - 1)
    return [(0, *cuts, blocks) for cuts in inner]


def value(costs: Costs, at: tuple[int, ...]) -> tuple[float, float]:
    """(largest, sum)"""
    found = [float(costs[end, start]) for start, end in itertools.pairwise(at)]
    return max(found), sum(found)


@given(sizes=SIZES, pieces=st.integers(1, 7), squared=st.booleans())
def test_no_other_way_has_a_smaller_largest_piece_or_of_equals_a_smaller_sum(
    sizes: list[float], pieces: int, squared: bool
) -> None:
    costs = piece_sums(sizes) ** (2 if squared else 1)
    at = linear_partition(costs, pieces)
    if pieces > len(sizes):
        assert at is None
        return
    assert at is not None
    assert value(costs, at) == min(value(costs, way) for way in ways(len(sizes), pieces))


@given(data=st.data(), blocks=st.integers(1, 6), pieces=st.integers(1, 6))
def test_any_costs_and_pieces_that_may_not_be(data: st.DataObject, blocks: int, pieces: int) -> None:
    """As many workers' slices cost: not a sum of their tokens."""
    costs = np.full((blocks + 1, blocks + 1), np.inf)
    for start, end in itertools.combinations(range(blocks + 1), 2):
        costs[end, start] = data.draw(st.sampled_from([1.0, 2.0, 3.0, 5.0, math.inf]))
    best = min((value(costs, way) for way in ways(blocks, pieces)), default=(math.inf, math.inf))
    at = linear_partition(costs, pieces)
    assert (at is None) == math.isinf(best[0])
    if at is not None:
        assert value(costs, at) == best


@given(sizes=SIZES)
def test_the_sum_of_a_piece(sizes: list[float]) -> None:
    costs = piece_sums(sizes)
    for start, end in itertools.product(range(len(sizes) + 1), repeat=2):
        assert costs[end, start] == (sum(sizes[start:end]) if start < end else math.inf)


def test_equals_are_cut_early_at_the_end() -> None:
    """Which segments a network has decides its losses: of equally good cuts always the same."""
    assert linear_partition(piece_sums([1.0] * 5), 4) == (0, 1, 2, 3, 5)
    assert linear_partition(piece_sums([1.0] * 12) ** 2, 4) == (0, 3, 6, 9, 12)
