"""Plans of shards against brute force, the time of double buffering against a simulation of its two streams."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_decentral.spilled.plan.shards import (
    BlockFootprint,
    Footprint,
    ShardPlan,
    Shards,
    Visit,
    double_buffered,
    plan,
    summary,
)

SECONDS = st.floats(0, 10)


@given(st.lists(st.tuples(SECONDS, SECONDS), max_size=8))
def test_double_buffering_is_two_streams_and_two_buffers(pieces: list[tuple[float, float]]) -> None:
    loaded = computed = before = 0.0
    for load, compute in pieces:  # a buffer is free once the piece before the last is computed
        loaded = max(loaded, before) + load
        before = computed
        begins = max(loaded, computed)
        before, computed = begins, begins + compute
    expected = double_buffered([load for load, _ in pieces], [compute for _, compute in pieces])
    assert computed == pytest.approx(expected)


def test_every_piece_needs_a_load() -> None:
    with pytest.raises(ValueError, match="1 loads for 2 computations"):
        double_buffered([1.0], [1.0, 2.0])


@st.composite
def footprints(draw: st.DrawFn) -> Footprint:
    """Up to five blocks, some of which share a parameter, forward and backward or in any order."""
    count = draw(st.integers(1, 5))
    blocks = []
    for i in range(count):
        shared = {"shared": 7} if draw(st.booleans()) else {}
        blocks.append(BlockFootprint(f"block.{i}", {f"w{i}": draw(st.integers(1, 50)), **shared}))
    there = [(i, False) for i in range(count)]
    way = draw(st.sampled_from([there, there + [(i, True) for i in reversed(range(count))], there + there[::-1]]))
    visits = [
        Visit(i, back, draw(SECONDS), draw(st.integers(0, 40)), draw(st.integers(0, 9)), draw(st.integers(0, 9)))
        for i, back in way
    ]
    return Footprint(tuple(blocks), tuple(visits), draw(st.integers(0, 60)), 10.0)


def partitions(count: int) -> list[Shards]:
    """All ways to cut a sequence."""
    found = []
    for cuts in itertools.product([False, True], repeat=count - 1):
        shards: list[tuple[int, ...]] = [(0,)]
        for i, cut in enumerate(cuts, start=1):
            shards = [*shards, (i,)] if cut else [*shards[:-1], (*shards[-1], i)]
        found.append(tuple(shards))
    return found


def walked(footprint: Footprint, shards: Shards) -> int:
    """The most bytes of a device that has the shard it is at and the next other one, step by step."""
    at = [next(shard for shard in shards if visit.block in shard) for visit in footprint.visits]
    most = footprint.opening_bytes + footprint.bytes_of(at[0])
    for i, visit in enumerate(footprint.visits):
        then = next((shard for shard in at[i:] if shard != at[i]), ())
        present = footprint.bytes_of({*at[i], *then}) + visit.other_bytes
        present += footprint.visits[i - 1].sent_bytes if i else 0
        present += footprint.visits[i + 1].awaited_bytes if i + 1 < len(at) else 0
        most = max(most, present)
    return most


@given(footprints())
def test_peaks_are_those_of_a_walk_and_a_budget_is_refused_only_if_nothing_fits(footprint: Footprint) -> None:
    every = {shards: walked(footprint, shards) for shards in partitions(len(footprint.blocks))}
    assert {shards: ShardPlan(footprint, shards).peak_bytes for shards in every} == every
    least = min(every.values())
    for budget in (least, least + 20, sum(every.values())):
        found = plan(footprint, budget)
        assert found.peak_bytes == every[found.shards] <= budget
    with pytest.raises(ValueError, match=f"{least} bytes|the step needs {least}"):
        plan(footprint, least - 1)


def chain(bytes_per_second: float = 10.0, seconds: float = 2.0) -> Footprint:
    blocks = tuple(BlockFootprint(f"block.{i}", {f"w{i}": 10}) for i in range(4))
    there = [Visit(i, False, seconds, 5) for i in range(4)]
    back = [Visit(i, True, 3 * seconds, 9, again_seconds=seconds, saved_bytes=4) for i in reversed(range(4))]
    return Footprint(blocks, (*there, *back), 1, bytes_per_second)


def test_a_chain_of_equal_blocks() -> None:
    footprint = chain()
    fastest = plan(footprint, 29)
    assert fastest.shards == ((0,), (1,), (2,), (3,)), "two blocks and 9 bytes are 29"
    assert fastest.load_bytes == [10, 10, 10, 10, 0, 10, 10], "what is turned around at stays, as does the one before"
    assert fastest.seconds == pytest.approx(1 + 4 * 2 + 4 * 6), "all loads but the first hide"
    slow = ShardPlan(replace(footprint, bytes_per_second=1.0), fastest.shards)
    assert slow.seconds == pytest.approx(10 + 3 * 10 + (2 + 6) + 10 + 10 + 6), "loads of 10 s over computing"


def test_more_memory_is_never_slower() -> None:
    footprint = chain(bytes_per_second=1.0)
    seconds = [plan(footprint, budget).seconds for budget in range(29, 70)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < seconds[0]


def test_a_refusal_names_block_bytes_budget_and_remedy() -> None:
    large = replace(chain(), blocks=(*chain().blocks[:2], BlockFootprint("large", {"w": 100}), chain().blocks[3]))
    with pytest.raises(
        ValueError, match=r"block block.3 needs 119 bytes.*100 for large, which.*memory_bytes=40: .*119"
    ):
        plan(large, 40)


def test_the_summary_says_when_nothing_has_to_be_spilled() -> None:
    footprint = chain()
    needed = 2 * 40 + 4 * 4 + 9 + 2 * 40  # parameters, gradients, activations, the rest, two states
    assert "advice" not in summary(plan(footprint, needed - 1), needed - 1)
    assert summary(plan(footprint, needed), needed)["advice"] == "the model fits: use the plain strategy"
    lost = plan(footprint, 40).seconds - 24  # forward and backward of four blocks, each once
    assert f"{lost:.3g} of them lost" in summary(plan(footprint, 40), 40)["seconds"]
