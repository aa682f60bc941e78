"""The simulation against formulas, brute force and its own laws; bad input."""

import itertools
import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_decentral.shared.plan.timeline import chrome_trace
from lightning_decentral.sweep import FIFO, LRTF, Policy
from lightning_decentral.sweep.plan.dispatch import Processor, Queue, WorkPiece, devices
from lightning_decentral.sweep.plan.policy import POLICIES as BY_NAME
from lightning_decentral.sweep.plan.simulation import (
    Ran,
    Spans,
    busy_fraction,
    computed,
    finish_seconds,
    lower_bound_seconds,
    makespan_seconds,
    mean_completion_seconds,
    pipelined_seconds,
    simulate,
)
from tests.sweep.plan.optimum import optimum_seconds

POLICIES = tuple(BY_NAME.values())
EIGHTHS = st.integers(0, 24).map(lambda n: n / 8)  # sums of these are exact


def queue(name: str, *compute: float, **words: float) -> Queue:
    return Queue(name, tuple(WorkPiece(seconds) for seconds in compute), **words)


def few(pieces: int) -> Callable[[list[Queue]], bool]:
    return lambda queues: sum(len(queue.pieces) for queue in queues) <= pieces


@st.composite
def jobs(draw: st.DrawFn, loads: bool = True, arrivals: bool = True, most: int = 5) -> list[Queue]:
    piece = st.builds(WorkPiece, EIGHTHS, EIGHTHS if loads else st.just(0.0))
    pieces = st.lists(piece, min_size=1, max_size=4).map(tuple)
    found = draw(st.lists(st.tuples(pieces, EIGHTHS if arrivals else st.just(0.0)), min_size=1, max_size=most))
    return [Queue(f"job {i}", *parts) for i, parts in enumerate(found)]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 4))
def test_longest_first_is_optimal_on_unit_shards(sizes: list[int], m: int) -> None:
    queues = [queue(str(i), *[1.0] * n) for i, n in enumerate(sizes)]
    spans = simulate(queues, devices(m), LRTF())
    assert makespan_seconds(queues, spans) == max(max(sizes), math.ceil(sum(sizes) / m))


@given(jobs(arrivals=False), st.sampled_from(POLICIES))
def test_one_device_loads_while_it_computes(queues: list[Queue], policy: Policy) -> None:
    spans = simulate(queues, devices(1), policy)
    order = sorted(computed(spans), key=lambda ran: (spans[ran].start, spans[ran].finish, list(spans).index(ran)))
    pieces = {q.name: q.pieces for q in queues}
    expected = pipelined_seconds([pieces[ran.job][ran.piece] for ran in order])
    assert makespan_seconds(queues, spans) == pytest.approx(expected)


def test_the_formula_by_hand() -> None:
    pieces = (WorkPiece(2.0, 1.0), WorkPiece(1.0, 5.0), WorkPiece(3.0, 0.5))
    assert pipelined_seconds(pieces) == 1 + 5 + 1 + 3
    assert makespan_seconds([Queue("a", pieces)], simulate([Queue("a", pieces)], devices(2), FIFO())) == 10


def check_laws(queues: list[Queue], spans: Spans) -> None:
    """Every piece once, jobs in order, nothing before it is loaded, one thing at a time on each row."""
    assert set(computed(spans)) == {Ran(q.name, i) for q in queues for i in range(len(q.pieces))}
    for q in queues:
        own = [spans[Ran(q.name, i)] for i in range(len(q.pieces))]
        assert all(a.finish <= b.start for a, b in itertools.pairwise(own))
        for i, (span, piece) in enumerate(zip(own, q.pieces, strict=True)):
            assert span.start >= q.arrival_seconds
            assert span.finish - span.start == piece.compute_seconds
            load = spans.get(Ran(q.name, i, load=True))
            assert (load is None) == (piece.load_seconds == 0)
            if load is not None:
                assert load.finish - load.start == piece.load_seconds
                assert q.arrival_seconds <= load.start <= load.finish <= span.start
                assert load.worker == f"{span.worker} loads"
    rows: dict[str, list[tuple[float, float]]] = {}
    for span in spans.values():
        rows.setdefault(span.worker, []).append((span.start, span.finish))
    for row in rows.values():
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(sorted(row)))


@given(jobs(), st.integers(1, 3), st.sampled_from(POLICIES))
def test_schedules_are_possible_and_not_under_the_bound(queues: list[Queue], m: int, policy: Policy) -> None:
    spans = simulate(queues, devices(m), policy)
    check_laws(queues, spans)
    assert makespan_seconds(queues, spans) >= lower_bound_seconds(queues, devices(m))
    assert 0 <= busy_fraction(queues, spans, devices(m)) <= 1


@given(jobs(loads=False), st.integers(1, 3), st.sampled_from(POLICIES))
def test_no_device_idles_while_a_job_waits(queues: list[Queue], m: int, policy: Policy) -> None:
    spans = simulate(queues, devices(m), policy)
    moments = sorted({edge for span in spans.values() for edge in (span.start, span.finish)})
    for a, b in itertools.pairwise(moments):
        middle = (a + b) / 2
        running = {ran.job for ran, span in spans.items() if span.start < middle < span.finish}
        finish = finish_seconds(spans)
        present = {q.name for q in queues if q.arrival_seconds <= a and middle < finish[q.name]}
        assert len(running) == min(m, len(present))


def all_orders(queues: list[Queue], m: int) -> float:
    """Of every interleaving, pieces to the device that is free first."""
    names = [i for i, q in enumerate(queues) for _ in q.pieces]
    best = math.inf
    for order in set(itertools.permutations(names)):
        ready, free, done = [0.0] * len(queues), [0.0] * m, [0] * len(queues)
        for j in order:
            finish = max(ready[j], min(free)) + queues[j].pieces[done[j]].compute_seconds
            free[free.index(min(free))] = ready[j] = finish
            done[j] += 1
        best = min(best, max(free))
    return best


@settings(max_examples=40)
@given(jobs(loads=False, arrivals=False, most=3).filter(few(6)), st.integers(1, 3))
def test_the_optimum_is_that_of_all_orders(queues: list[Queue], m: int) -> None:
    assert optimum_seconds(queues, m) == all_orders(queues, m)


@settings(max_examples=40)
@given(jobs(loads=False, arrivals=False, most=4).filter(few(9)), st.integers(1, 3))
def test_policies_lie_between_the_optimum_and_twice_it(queues: list[Queue], m: int) -> None:
    best = optimum_seconds(queues, m)
    assert lower_bound_seconds(queues, devices(m)) <= best
    for policy in POLICIES:
        assert best <= makespan_seconds(queues, simulate(queues, devices(m), policy)) <= 2 * best


def test_measures_by_hand() -> None:
    queues = [queue("long", 4.0), queue("short", 1.0, 1.0, arrival_seconds=1.0)]
    spans = simulate(queues, devices(1), FIFO())
    assert finish_seconds(spans) == {"long": 4.0, "short": 6.0}
    assert mean_completion_seconds(queues, spans) == (4 + 5) / 2
    assert busy_fraction(queues, spans, devices(1)) == 1
    assert busy_fraction(queues, simulate(queues, devices(2), FIFO()), devices(2)) == 6 / 8
    first = chrome_trace(spans)[0]
    assert (first["name"], first["tid"], first["ts"], first["dur"]) == ("long 0", "device 0", 0, 4e6)


def test_a_job_runs_where_it_fits() -> None:
    small, large = Processor("small", 1e9), Processor("large", 4e9)
    queues = [queue("big", 2.0, 2.0, memory_bytes=3e9), queue("a", 1.0), queue("b", 3.0)]
    spans = simulate(queues, [small, large], FIFO())
    assert {span.worker for ran, span in spans.items() if ran.job == "big"} == {"large"}
    assert makespan_seconds(queues, spans) == 4


@pytest.mark.parametrize(("room", "seconds"), [(4e9, 1 + 2 + 2), (3e9, 1 + 2 + 1 + 2)])
def test_what_is_loaded_ahead_must_fit_beside_what_computes(room: float, seconds: float) -> None:
    queues = [Queue(name, (WorkPiece(2.0, 1.0),), memory_bytes=2e9) for name in "ab"]
    assert makespan_seconds(queues, simulate(queues, devices(1, room), FIFO())) == seconds


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: simulate([], devices(1), FIFO()), "no job"),
        (lambda: simulate([queue("a", 1.0)] * 2, devices(1), FIFO()), "two jobs are called 'a'"),
        (lambda: simulate([queue("a", 1.0, memory_bytes=2e9)], devices(2, 1e9), FIFO()), "a needs 2000000000 bytes"),
        (lambda: devices(0), "at least 1, got 0"),
        (lambda: queue("a"), "job a has no pieces"),
        (lambda: queue("a", 1.0, arrival_seconds=-1.0), "arrives at -1"),
        (lambda: WorkPiece(-1.0), "compute_seconds of a piece must be 0 or more, got -1"),
        (lambda: WorkPiece(1.0, math.nan), "load_seconds"),
        (lambda: optimum_seconds([queue("a", *[1.0] * 15)], 2), "15 pieces"),
        (lambda: optimum_seconds([Queue("a", (WorkPiece(1.0, 1.0),))], 2), "without loading"),
    ],
)
def test_mistakes_name_the_value(act: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        act()
