"""Costs against closed forms, the partition against brute force."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_decentral.partial import Blocks, Parameters, SavedBytes, Seconds
from lightning_decentral.partial.plan.cost import compute_fraction, memory_fraction
from lightning_decentral.shared.plan.linear_partition import balanced_partition
from lightning_decentral.shared.plan.profile import BlockCost


@given(blocks=st.integers(1, 20), depth=st.integers(1, 20))
def test_equal_blocks(blocks: int, depth: int) -> None:
    """(L + 2 d) / (3 L) of the compute, d / L of the memory."""
    depth = min(depth, blocks)
    costs = [BlockCost(forward_seconds=0.5, parameter_bytes=8, saved_bytes=100)] * blocks
    assert math.isclose(compute_fraction(costs, depth), (blocks + 2 * depth) / (3 * blocks))
    assert math.isclose(memory_fraction(costs, depth), depth / blocks)


@given(sizes=st.lists(st.integers(0, 20).map(float), min_size=1, max_size=8), pieces=st.integers(1, 8))
def test_partition_is_the_best(sizes: list[float], pieces: int) -> None:
    pieces = min(pieces, len(sizes))

    def largest(starts: tuple[int, ...]) -> float:
        bounds = [0, *starts, len(sizes)]
        return max(sum(sizes[a:b]) for a, b in itertools.pairwise(bounds))

    best = min(map(largest, itertools.combinations(range(1, len(sizes)), pieces - 1)))
    _, *starts, _ = balanced_partition(sizes, pieces)
    assert len(starts) == pieces - 1
    assert starts == sorted(set(starts))
    assert largest(tuple(starts)) == best


@pytest.mark.parametrize(("balance", "size"), [(Blocks(), 1), (Seconds(), 2), (SavedBytes(), 3), (Parameters(), 4)])
def test_what_balances(balance: object, size: float) -> None:
    assert balance.of(BlockCost(forward_seconds=2.0, parameter_bytes=4, saved_bytes=3)) == size
