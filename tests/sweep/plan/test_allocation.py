"""SPASE's arbiters with members that only count: what a trial predicts, who starts when, when a plan is made anew."""

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_decentral.sweep.plan.allocation import WARM, Allocated, Trials
from lightning_decentral.sweep.plan.arbiter import Arbiter, Instruction, TurnReport
from lightning_decentral.sweep.plan.spase import Table, planned

DEVICES = ("cpu:0", "cpu:1", "cpu:2")
Steps = Mapping[str, Sequence[float]]  # seconds of each step, after those of the start


def played(arbiter: Arbiter, steps: Steps) -> dict[str, tuple[float, float]]:
    """Members that start when the arbiter lets them, ask before each step and end with their last one, or by its order.

    Returns when each started and ended; two never have one device.
    """
    left, began, done, found = (
        list(steps),
        dict[str, float](),
        dict.fromkeys(steps, -1),
        dict[str, tuple[float, float]](),
    )
    events: list[tuple[float, str]] = []
    now = 0.0
    while left or events:
        while (name := arbiter.next_start(left, now)) is not None:
            left.remove(name)
            arbiter.join(name)
            began[name] = now
            heapq.heappush(events, (now + steps[name][0], name))
        homes = [device for member in arbiter.members.values() for device in member.home]
        assert len(homes) == len(set(homes))
        now, name = heapq.heappop(events)
        if name not in found:  # otherwise it was ended by an order
            done[name] += 1
            for other in reported(arbiter, name, steps[name][1:], done[name], now):
                arbiter.leave(other, now)
                found[other] = began[other], now
            if name not in found:
                heapq.heappush(events, (now + steps[name][1 + done[name]], name))
    return found


def reported(arbiter: Arbiter, name: str, steps: Sequence[float], done: int, now: float) -> set[str]:
    """Let a member report and ask, if it isn't through; return who ends."""
    if done:
        arbiter.give_back(name, TurnReport(done / len(steps), sum(steps[done:])), now)
    if done < len(steps):
        arbiter.request(name)
    orders = arbiter.settle(now)
    assert done == len(steps) or (name, Instruction.RUN) in orders, "nobody else has its device"
    return {other for other, order in orders if order is Instruction.END} | ({name} if done == len(steps) else set())


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 8), st.integers(8, 40)), min_size=1, max_size=6),
    st.integers(0, 5),
)
def test_a_trial_predicts_the_whole_job_of_equal_steps(drawn: list[tuple[int, int, int]], start: int) -> None:
    widths = {str(j): width for j, (width, _, _) in enumerate(drawn)}
    steps = {str(j): [start, *[9.0] * WARM, *[seconds] * (n - WARM)] for j, (_, seconds, n) in enumerate(drawn)}
    arbiter = Trials(widths, DEVICES, steps=4, limit_seconds=math.inf)
    found = played(arbiter, steps)
    assert found.keys() == steps.keys()
    for name, (began, ended) in found.items():
        assert ended - began == sum(steps[name][: 1 + WARM + 4]), "ended after four steps behind the first ones"
        assert arbiter.seconds(name, complete=False) == pytest.approx(sum(steps[name]))
        assert len(arbiter.ended[name].spans) == widths[name]


def test_a_trial_of_too_few_steps_counts_if_the_job_was_complete() -> None:
    arbiter = Trials({"a": 1}, DEVICES, steps=4, limit_seconds=math.inf)
    played(arbiter, {"a": [1.0, 2.0, 2.0]})
    assert arbiter.seconds("a", complete=True) == 5
    with pytest.raises(ValueError, match="2 steps of 7 within 5 s"):
        arbiter.seconds("a", complete=False)


def test_a_trial_ends_at_its_limit() -> None:
    arbiter = Trials({"a": 1, "b": 1}, DEVICES[:1], steps=4, limit_seconds=10.0)
    found = played(arbiter, {"a": [1.0, *[4.0] * 20], "b": [1.0, *[0.5] * 20]})
    assert found["a"] == (0, 13), "at the first report after it"
    assert found["b"][1] - found["b"][0] == 1 + 0.5 * (WARM + 4)


TABLES = st.lists(
    st.dictionaries(st.integers(1, 3), st.integers(2, 9).map(float), min_size=1), min_size=1, max_size=5
).map(lambda rows: [Table(str(j), row) for j, row in enumerate(rows)])


class Following:
    """Steps of members that last as long as the table says for the devices that they were given."""

    def __init__(self, tables: Sequence[Table], slower: Mapping[str, float] = {}) -> None:
        self.tables, self.slower = {table.name: table for table in tables}, slower
        self.arbiter: Allocated

    def __iter__(self) -> Iterator[str]:
        return iter(self.tables)

    def __getitem__(self, name: str) -> list[float]:
        seconds = self.tables[name].seconds[len(self.arbiter.started[name].devices)]
        return [0.0, *[seconds * self.slower.get(name, 1.0) / 4] * 4]


def carried_out(
    tables: Sequence[Table], slower: Mapping[str, float] = {}, devices: Sequence[str] = DEVICES
) -> tuple[Allocated, float]:
    arbiter, steps = Allocated(tables, devices, interval_seconds=1.0), Following(tables, slower)
    steps.arbiter = arbiter
    found = played(arbiter, steps)  # type: ignore[arg-type]
    assert found.keys() == {table.name for table in tables}
    return arbiter, max(end for _, end in found.values())


@settings(max_examples=20, deadline=None)
@given(TABLES)
def test_members_that_last_as_predicted_end_as_planned(tables: list[Table]) -> None:
    arbiter, end = carried_out(tables)
    assert end == pytest.approx(planned(tables, 3).makespan_seconds)
    for name, job in arbiter.started.items():
        assert tuple(DEVICES[g] for g in job.devices) == arbiter.ended[name].home


@settings(max_examples=20, deadline=None)
@given(TABLES, st.integers(1, 4))
def test_members_that_last_longer_all_end(tables: list[Table], factor: int) -> None:
    carried_out(tables, {"0": float(factor)})


def test_a_plan_is_made_anew_where_a_member_lasts_longer() -> None:
    """Two short ones come after each other on one device, the long one has the other, where the second is sooner."""
    tables = [Table("long", {1: 6.0}), Table("a", {1: 3.0}), Table("b", {1: 3.0})]
    arbiter, end = carried_out(tables, {"a": 4.0, "b": 4.0}, DEVICES[:2])
    assert (arbiter.changes, end) == (1, 18), "by the first plan 24"
    assert carried_out(tables, {}, DEVICES[:2])[0].changes == 0
