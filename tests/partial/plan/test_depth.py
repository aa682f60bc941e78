"""Laws of depth assignments, and their schedules against closed forms."""

import inspect
import itertools
import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_decentral.partial import (
    Balanced,
    BlockCoordinate,
    Cyclic,
    Lisa,
    PerWorker,
    Random,
    Staircase,
    Temporal,
)
from lightning_decentral.partial.plan import depth, selection
from lightning_decentral.partial.plan.depth import check, contributors

GIVEN: dict[str, dict[str, Any]] = {
    "PerWorker": {"fractions": (0.3, 1.0, 0.5)},
    "Lisa": {"every": 3},
    "BlockCoordinate": {"every": 2},
}


def classes(kind: type, *modules: Any) -> list[type]:
    found = [c for m in modules for _, c in inspect.getmembers(m, inspect.isclass) if c.__module__ == m.__name__]
    return [c for c in found if issubclass(c, kind) and not inspect.isabstract(c)]


EVERY = classes(depth.DepthAssignment, depth, selection)
ORDERS = classes(depth.Order, depth)


def make(kind: type, **more: Any) -> Any:
    return kind(**{**GIVEN.get(kind.__name__, {}), **more})


def size_of(kind: type, size: int) -> int:
    return 3 if kind is PerWorker else size


@pytest.mark.sampled
@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
@given(size=st.integers(1, 9), segments=st.integers(1, 12), step=st.integers(0, 60), warm_up=st.integers(0, 20))
def test_laws_of_every_assignment(kind: type, size: int, segments: int, step: int, warm_up: int) -> None:
    assignment, size = make(kind, warm_up=warm_up), size_of(kind, size)
    depths = [assignment.depth(rank, size, step, segments) for rank in range(size)]
    assert all(1 <= d <= segments for d in depths)
    assert step >= warm_up or set(depths) == {segments}
    assert len(set(depths)) == 1 or isinstance(assignment, (Staircase, PerWorker))
    assert max(depths) <= (segments if step < warm_up else assignment.reach(size, segments))
    found = contributors(assignment, size, step, segments)
    trained = [assignment.trained(rank, size, step, segments) for rank in range(size)]
    assert [tuple(s for s in range(segments) if rank in found[s]) for rank in range(size)] == trained, "ascending"
    assert [segments - own[0] for own in trained] == depths, "the backward ends at the lowest"
    assert found[-1] in ((), tuple(range(size))), "the segment with the loss is everyone's, or nobody's"
    if not issubclass(kind, selection.Selection):
        assert found[-1], "and trained"
        assert all(set(low) <= set(high) for low, high in itertools.pairwise(found)), "nested"
    assert math.isclose(sum(assignment.share(rank, size) for rank in range(size)), 1)
    check(make(kind), size, segments)


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
def test_a_negative_warm_up_is_refused(kind: type) -> None:
    with pytest.raises(ValueError, match="warm_up must be at least 0 steps, got -1"):
        make(kind, warm_up=-1)
    with pytest.raises(ValueError, match=r"whole steps or a fraction of the run below 1, got 2\.5"):
        make(kind, warm_up=2.5)


@pytest.mark.parametrize(
    ("warm_up", "total_steps", "steps"),
    [(0.25, 80, 20), (0.25, 7, 2), (0.25, math.inf, 0), (0.25, -1, 0), (0, 80, 0), (1, 80, 1), (7, 80, 7)],
)
def test_a_warm_up_may_be_a_part_of_the_run(warm_up: float, total_steps: float, steps: int) -> None:
    timed = Temporal(warm_up=warm_up).timed(total_steps)
    assert timed == Temporal(warm_up=steps)
    assert [timed.depth(0, 2, step, 4) for step in range(steps)] == [4] * steps
    assert [timed.depth(0, 2, steps + i, 4) for i in range(2)] == [4, 2]


@given(size=st.integers(1, 9))
def test_staircase_compute(size: int) -> None:
    """Mean of (n + 2 d) / (3 n) over the workers is (2 n + 1) / (3 n) for n segments."""
    depths = [Staircase().depth(rank, size, 0, size) for rank in range(size)]
    assert depths == list(range(1, size + 1))
    mean = sum((size + 2 * d) / (3 * size) for d in depths) / size
    assert math.isclose(mean, (2 * size + 1) / (3 * size))


@given(size=st.integers(1, 9), stairs=st.integers(1, 3))
def test_balanced_workers_finish_together(size: int, stairs: int) -> None:
    assignment, segments = Balanced(), size * stairs
    depths = [assignment.depth(rank, size, 0, segments) for rank in range(size)]
    seconds = [assignment.share(r, size) * (1 + 2 * d / segments) for r, d in enumerate(depths)]
    assert math.isclose(min(seconds), max(seconds))


@pytest.mark.parametrize("kind", ORDERS, ids=lambda kind: kind.__name__)
@given(segments=st.integers(1, 12), step=st.integers(0, 1000))
def test_laws_of_every_order(kind: type, segments: int, step: int) -> None:
    assert 1 <= kind().depth(step, segments) <= kind().reach(segments) <= segments
    assert kind().depth(step, segments) == kind().depth(step, segments), "no state"


def test_cyclic_takes_every_depth_once() -> None:
    assert [Cyclic(fractions=None).depth(step, 4) for step in range(8)] == [4, 3, 2, 1, 4, 3, 2, 1]
    assert [Cyclic().depth(step, 4) for step in range(4)] == [4, 2, 4, 2], "the default"
    assert [Cyclic(fractions=(1.0, 0.5)).depth(step, 5) for step in range(4)] == [5, 3, 5, 3]


def test_random_orders_have_their_frequencies() -> None:
    drawn = Counter(Random().depth(step, 4) for step in range(4000))
    assert all(abs(drawn[d] / 4000 - 0.25) < 0.04 for d in (1, 2, 3, 4))


@pytest.mark.parametrize(("build", "message"), [
    (lambda: Cyclic(fractions=(0.0,)), r"fractions must be in \(0, 1\]"),
    (lambda: PerWorker(fractions=(1.5,)), r"fractions must be in \(0, 1\]"),
    (lambda: Lisa(blocks=0), "blocks must be at least 1, got 0"),
    (lambda: Lisa(every=0), "every must be at least 1, got 0"),
    (lambda: BlockCoordinate(every=0), "every must be at least 1, got 0"),
])  # fmt: skip
def test_wrong_values_are_refused(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_a_segment_that_nobody_trains_is_refused() -> None:
    half = Temporal(order=Cyclic(fractions=(0.5,)), warm_up=0)
    with pytest.raises(ValueError, match=r"never trains the lowest 2 of 4 segments"):
        check(half, 2, 4)
    check(Temporal(order=Cyclic(fractions=(0.5,)), warm_up=10), 2, 4)


def test_lisa_draws_its_blocks_evenly_and_keeps_the_ends() -> None:
    draws = [Lisa(every=5, blocks=2).trained(0, 2, step, 8) for step in range(0, 15000, 5)]
    assert all(own[0] == 0 and own[-1] == 7 and len(own) == 4 for own in draws)
    drawn = Counter(s for own in draws for s in own[1:-1])
    assert all(abs(drawn[s] / len(draws) - 2 / 6) < 0.04 for s in range(1, 7)), "gamma of six"
    once = {Lisa(every=5).trained(0, 2, step, 8) for step in range(5, 10)}
    assert len(once) == 1, "the same for every steps"
    assert Lisa().trained(0, 2, 0, 2) == (0, 1), "nothing between"


def test_block_coordinates_come_once_in_every_sweep() -> None:
    assignment = BlockCoordinate(every=3, warm_up=4)
    assert assignment.trained(0, 1, 3, 5) == (0, 1, 2, 3, 4), "the warm-up trains all"
    visits = [assignment.trained(0, 1, 4 + 3 * visit, 5) for visit in range(50)]
    assert all(assignment.trained(1, 2, 6 + 3 * v, 5) == own for v, own in enumerate(visits)), "for three steps, on all"
    sweeps = [visits[i : i + 5] for i in range(0, 50, 5)]
    assert all(sorted(sweep) == [(s,) for s in range(5)] for sweep in sweeps)
    assert len({tuple(sweep) for sweep in sweeps}) > 5, "drawn anew"
