"""Plans of jobs on several devices each, against brute force over sizes and orders."""

import itertools
import math
import sys
from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_decentral.sweep.plan.gangs import ExactGangs as ExactTurns
from lightning_decentral.sweep.plan.gangs import Gang
from lightning_decentral.sweep.plan.gangs import GreedyGangs as GreedyTurns
from lightning_decentral.sweep.plan.milp import MILP, NoSolution
from lightning_decentral.sweep.plan.spase import ExactSpase, GreedySpase, SpasePlan, Table, lower_bound_seconds


@st.composite
def tables(draw: st.DrawFn, most: int = 4) -> list[Table]:
    seconds = st.dictionaries(st.integers(1, 3), st.integers(1, 16).map(lambda n: n / 4), min_size=1, max_size=3)
    found = draw(st.lists(seconds, min_size=1, max_size=most))
    return [Table(f"job {j}", row) for j, row in enumerate(found)]


FREE = (0.5, 0.0, 1.25)


def earliest(placed: list[tuple[float, float, int]], k: int, seconds: float, devices: int) -> float:
    """The first moment from which k devices stay free for so long."""

    def fits(start: float) -> bool:
        moments = [start, *(s for s, _, _ in placed if start < s < start + seconds)]
        return all(sum(n for s, e, n in placed if s <= m < e) + k <= devices for m in moments)

    return next(start for start in sorted({0.0, *(e for _, e, _ in placed)}) if fits(start))


def brute_force(found: list[Table], devices: int, free: Sequence[float] = ()) -> float:
    """Every size of every job in every order, each placed as early as it fits."""
    best = math.inf
    for sizes in itertools.product(*(table.seconds.items() for table in found)):
        for order in itertools.permutations(sizes):
            placed: list[tuple[float, float, int]] = [(0.0, until, 1) for until in free if until]
            for k, seconds in order:
                start = earliest(placed, k, seconds, devices)
                placed.append((start, start + seconds, k))
            best = min(best, max(end for _, end, _ in placed))
    return best


def check(plan: SpasePlan, found: list[Table], devices: int, free: Sequence[float] = ()) -> None:
    """One entry of its table each, and no device twice at a time."""
    assert [job.name for job in plan.granted] == [table.name for table in found]
    for job, table in zip(plan.granted, found, strict=True):
        assert table.seconds[len(set(job.devices))] == job.seconds
        assert set(job.devices) <= set(range(devices))
        assert all(job.start >= free[g] for g in job.devices if free)
    for a, b in itertools.combinations(plan.granted, 2):
        if set(a.devices) & set(b.devices):
            assert a.start + a.seconds <= b.start or b.start + b.seconds <= a.start
    assert plan.makespan_seconds >= lower_bound_seconds(found, devices, free)


# The solver's rounding adds up to more than 1e-5 of this makespan.
ROUNDED = [
    Table("0", {1: 0.75, 2: 0.25, 3: 0.5}),
    Table("1", {1: 0.75, 2: 0.25, 3: 0.25}),
    Table("2", {1: 2.25, 2: 0.25}),
]


@settings(max_examples=25, deadline=None)
@given(tables(most=3))
@example(ROUNDED)
def test_exact_is_the_best_of_all(found: list[Table]) -> None:
    plan = ExactSpase().plan(found, 3)
    check(plan, found, 3)
    assert plan.makespan_seconds == pytest.approx(brute_force(found, 3))
    assert plan.gap == 0


@settings(max_examples=25, deadline=None)
@given(tables(most=3))
def test_exact_is_the_best_beside_jobs_that_run_already(found: list[Table]) -> None:
    plan = ExactSpase().plan(found, 3, FREE)
    check(plan, found, 3, FREE)
    assert plan.makespan_seconds == pytest.approx(brute_force(found, 3, FREE))
    assert plan.gap == 0


@given(tables(most=6), st.sampled_from([(), FREE]))
def test_greedy_never_loses_to_an_equal_number_of_devices_for_every_job(
    found: list[Table], free: Sequence[float]
) -> None:
    plan = GreedySpase().plan(found, 3, free)
    check(plan, found, 3, free)
    for k in (1, 2, 3):
        numbers = [min((n for n in job.seconds if n >= k), default=max(job.seconds)) for job in found]
        fixed = [Table(job.name, {n: job.seconds[n]}) for job, n in zip(found, numbers, strict=True)]
        assert plan.makespan_seconds <= GreedySpase().plan(fixed, 3, free).makespan_seconds


def test_an_equal_number_of_devices_beats_the_thresholds() -> None:
    """By thresholds the second job gets one device, which is no less work, and waits for the first: 4."""
    found = [Table("a", {1: 4.0, 2: 2.0}), Table("b", {1: 2.0, 2: 1.0})]
    assert GreedySpase().plan(found, 2).makespan_seconds == 3


@given(tables(most=6))
def test_greedy_is_possible_and_says_its_gap(found: list[Table]) -> None:
    plan = GreedySpase().plan(found, 3)
    check(plan, found, 3)
    bound = plan.makespan_seconds * (1 - plan.gap)
    assert bound == pytest.approx(lower_bound_seconds(found, 3)) or plan.gap == 0


def test_by_hand() -> None:
    """Two that speed up well share all devices in turn; a third that doesn't would hold one for long."""
    found = [Table("a", {1: 8.0, 2: 4.0}), Table("b", {1: 8.0, 2: 4.0}), Table("c", {1: 8.0})]
    plan = ExactSpase().plan(found, 3)
    assert plan.makespan_seconds == 8
    assert [len(job.devices) for job in plan.granted] in ([2, 2, 1], [1, 1, 1])
    assert {span.worker for span in plan.spans().values()} == {"device 0", "device 1", "device 2"}


def test_the_program_beats_greedy_where_it_can() -> None:
    found = [Table(str(j), {1: s}) for j, s in enumerate((3.0, 3.0, 2.0, 2.0, 2.0))]
    assert GreedySpase().plan(found, 2).makespan_seconds == 7
    exact = ExactSpase().plan(found, 2)
    assert (exact.makespan_seconds, exact.gap, exact.how) == (6, 0, "milp")


def test_a_point_on_the_solvers_tolerance_is_not_lost() -> None:
    """HiGHS 1.12 ends in an error: its best point is off by 1e-6 and a rounding."""
    found = [Table("a", {1: 0.25}), Table("b", {2: 0.75}), Table("c", {2: 1.0, 3: 0.5})]
    plan = ExactSpase().plan(found, 3)
    assert (plan.makespan_seconds, plan.gap, plan.how) == (1.25, 0, "milp")


def test_no_time_for_the_program_leaves_greedy_with_its_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(self: MILP, limit_seconds: float) -> None:
        raise NoSolution(f"no schedule within {limit_seconds:g} s")

    monkeypatch.setattr(MILP, "solve", late)
    plan = ExactSpase(limit_seconds=0.1).plan(
        [Table(str(j), {1: s}) for j, s in enumerate((3.0, 3.0, 2.0, 2.0, 2.0))], 2
    )
    assert plan.how == "greedy"
    assert plan.gap == pytest.approx(1 / 7)
    found = [Gang(name, (0.0, 1.0)) for name in "abc"]
    assert ExactTurns().turns(found) == GreedyTurns().turns(found)


def test_an_impossible_program_says_so() -> None:
    program = MILP()
    program.equal({program.binary(): 1.0}, 2.0)
    with pytest.raises(NoSolution, match="no schedule within 1 s"):
        program.solve(1.0)


def test_without_scipy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    needed = r"pip install 'lightning-decentral\[schedule\]'"
    with pytest.raises(ValueError, match=needed):
        ExactSpase().plan([Table(str(j), {1: s}) for j, s in enumerate((3.0, 3.0, 2.0, 2.0, 2.0))], 2)
    with pytest.raises(ValueError, match=needed):
        ExactTurns().turns([Gang(name, (0.0, 1.0)) for name in "abc"])


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: GreedySpase().plan([], 2), "one or more of different names"),
        (lambda: GreedySpase().plan([Table("a", {1: 1.0})] * 2, 2), "different names"),
        (lambda: GreedySpase().plan([Table("a", {4: 1.0})], 2), "job a needs 4 devices, but there are 2"),
        (lambda: Table("a", {}), "job a must map 1 or more devices"),
        (lambda: Table("a", {0: 1.0}), "got {0: 1.0}"),
        (lambda: Table("a", {1: 0.0}), "got {1: 0.0}"),
    ],
)
def test_mistakes_name_the_value(act: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        act()
