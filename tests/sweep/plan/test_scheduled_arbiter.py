"""The arbiters of a schedule with members that only count, against the simulation of the same jobs."""

import heapq
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_decentral.shared.plan.timeline import Span
from lightning_decentral.sweep import RoundRobin
from lightning_decentral.sweep.plan.arbiter import Instruction, TurnReport
from lightning_decentral.sweep.plan.dispatch import Queue, WorkPiece, devices
from lightning_decentral.sweep.plan.policy import POLICIES
from lightning_decentral.sweep.plan.scheduled_arbiter import Scheduled
from lightning_decentral.sweep.plan.simulation import Ran, Spans, finish_seconds, simulate

STARTS = 8.0  # when the last of the processes has started


def played(arbiter: Scheduled, queues: Sequence[Queue]) -> Spans:
    """Pieces of whole seconds of members that all ask by STARTS, one after the other, each ending with its last one."""
    pieces = {queue.name: [piece.compute_seconds for piece in queue.pieces] for queue in queues}
    done, began, spans = dict.fromkeys(pieces, 0), dict[str, float](), Spans()
    for queue in sorted(queues, key=lambda queue: queue.arrival_seconds):
        arbiter.join(queue.name)
    events = [(STARTS * i / len(queues), i, name, False) for i, name in enumerate(pieces, start=1)]
    now = 0.0
    while events or any(done[name] < len(pieces[name]) for name in pieces):
        rest = now + arbiter.rests_seconds(now)
        now = min(rest, events[0][0]) if events else rest
        while events and events[0][0] <= now:
            _, _, name, ran = heapq.heappop(events)
            if ran:
                spans[Ran(name, done[name])] = Span(arbiter.members[name].devices[0], began[name], now)
                done[name] += 1
                arbiter.give_back(name, TurnReport(done[name] / len(pieces[name])), now)
            if done[name] < len(pieces[name]):
                arbiter.request(name)
            else:
                arbiter.leave(name, now)
        for name, order in arbiter.settle(now):
            assert order is Instruction.RUN
            began[name] = now
            heapq.heappush(events, (now + pieces[name][done[name]], int(name), name, True))
    return spans


JOBS = st.lists(
    st.tuples(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(0, 6)), min_size=1, max_size=5
)


@given(drawn=JOBS, number=st.integers(1, 3), policy=st.sampled_from(sorted(POLICIES)))
def test_members_run_as_simulated(drawn: list[tuple[list[int], int]], number: int, policy: str) -> None:
    """Piece by piece, on the same clock, which starts when the last process has."""
    queues = [
        Queue(str(i), tuple(WorkPiece(float(s)) for s in seconds), float(arrival))
        for i, (seconds, arrival) in enumerate(drawn)
    ]
    there = devices(number)
    arbiter = Scheduled(queues, POLICIES[policy], [device.name for device in there])
    spans = played(arbiter, queues)
    simulated = simulate(queues, there, POLICIES[policy])
    assert arbiter.opened == STARTS
    assert {ran: (span.start - STARTS, span.finish - STARTS) for ran, span in spans.items()} == {
        ran: (span.start, span.finish) for ran, span in simulated.items()
    }
    assert finish_seconds(arbiter.ran(there)) == finish_seconds(simulated)


def turns(names: str, steps: int) -> list[Queue]:
    """Jobs whose steps' seconds nobody knows yet."""
    return [Queue(name, (WorkPiece(0.0),) * steps) for name in names]


def test_nobody_waits_for_one_that_failed_at_its_start() -> None:
    arbiter = Scheduled(turns("ab", 4), RoundRobin(), ["cpu:0"])
    for name in "ab":
        arbiter.join(name)
    arbiter.request("a")
    assert arbiter.settle(1.0) == []
    arbiter.leave("b", 2.0)
    assert arbiter.settle(2.0) == [("a", Instruction.RUN)]
    assert arbiter.opened == 2.0


def test_seconds_of_steps_are_those_of_their_grants() -> None:
    """The first two steps are as they are, the others their mean; b accumulates two batches for a step."""
    arbiter = Scheduled(turns("ab", 4), RoundRobin(), ["cpu:0"])
    batches = {"a": [5.0, 2.0, 1.0, 3.0], "b": [0.5, 0.5, 1.0, 1.0, 2.0, 2.0, 0.5, 0.5]}
    for name in batches:
        arbiter.join(name)
        arbiter.request(name)
    now = 0.0
    made = dict.fromkeys(batches, 0)
    while any(batches.values()):
        ((name, order),) = arbiter.settle(now)
        assert order is Instruction.RUN
        now += batches[name].pop(0)
        made[name] += 1
        arbiter.give_back(name, TurnReport(made[name] // {"a": 1, "b": 2}[name] / 4), now)
        if batches[name]:
            arbiter.request(name)
    assert arbiter.step_seconds("a", 5, first=2) == [5.0, 2.0, 2.0, 2.0, 2.0]
    assert arbiter.step_seconds("b", 3, first=2) == [1.0, 2.0, 2.5]
    assert arbiter.step_seconds("a", 1, first=2) == [5.0]


def test_members_that_end_early_or_jump_are_refused() -> None:
    arbiter = Scheduled(turns("ab", 4), RoundRobin(), ["cpu:0", "cpu:1"])
    for name, progress in (("a", 0.5), ("b", 1.0)):
        arbiter.join(name)
        arbiter.give_back(name, TurnReport(progress), 1.0)
    with pytest.raises(ValueError, match="job a ended after 50% of its steps: leave out what stops it early"):
        arbiter.step_seconds("a", 4, first=1)
    with pytest.raises(ValueError, match="job b makes several steps in a batch"):
        arbiter.step_seconds("b", 4, first=1)
    queue = Queue("a", (WorkPiece(1.0),) * 4)
    scheduled = Scheduled([queue], RoundRobin(), ["cpu:0"])
    scheduled.join("a")
    scheduled.give_back("a", TurnReport(0.25), 1.0)
    scheduled.leave("a", 1.0)
    with pytest.raises(ValueError, match="job a ended after 25% of its steps"):
        scheduled.ran(devices(1))
