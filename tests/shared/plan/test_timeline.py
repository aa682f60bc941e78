"""The discrete-event run against hand-computed cases and a brute-force fixed point."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_decentral.shared.plan.timeline import (
    Deadlock,
    Task,
    bubble,
    chrome_trace,
    makespan,
    run,
    write_chrome_trace,
)


def relaxed(tasks):
    """Start times by repeating start = max(worker's previous finish, needs' finishes) until nothing changes."""
    start = {task.name: 0.0 for task in tasks}
    seconds = {task.name: task.seconds for task in tasks}
    while True:
        new, last = {}, {}
        for task in tasks:
            before = [start[n] + seconds[n] for n in task.needs]
            if task.worker in last:
                previous = last[task.worker]
                before.append(start[previous] + seconds[previous])
            new[task.name] = max([0.0, *before])
            last[task.worker] = task.name
        if new == start:
            return start
        start = new


@st.composite
def acyclic(draw):
    count = draw(st.integers(1, 12))
    tasks = []
    for i in range(count):
        needs = draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else set()
        tasks.append(Task(i, f"w{draw(st.integers(0, 2))}", draw(st.integers(0, 5)) / 4, tuple(needs)))
    return tasks


@given(acyclic())
def test_starts_are_the_fixed_point(tasks):
    spans = run(tasks)
    assert {name: span.start for name, span in spans.items()} == relaxed(tasks)
    assert makespan(spans) == max(s.finish for s in spans.values()) - min(s.start for s in spans.values())


def test_tasks_that_wait_for_each_other_are_named():
    with pytest.raises(Deadlock, match=r"a: 1, b: 2"):
        run([Task(1, "a", 1.0, (2,)), Task(2, "b", 1.0, (1,))])
    with pytest.raises(Deadlock, match="never"):
        run([Task("x", "a", 1.0, ("nowhere",))])


def test_bubble_of_a_worker_that_waits_half_of_the_time():
    spans = run([Task("x", "a", 2.0), Task("y", "b", 2.0, ("x",))])
    assert bubble(spans, ["a", "b"]) == 0.5
    assert makespan({}) == 0


def test_the_trace_is_what_a_viewer_reads(tmp_path):
    spans = run([Task("x", "a", 2e-3), Task("y", "b", 1e-3, ("x",))])
    write_chrome_trace(chrome_trace(spans), tmp_path / "trace.json")
    _, event = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert (event["name"], event["ph"], event["tid"]) == ("y", "X", "b")
    assert (event["ts"], event["dur"]) == pytest.approx((2000, 1000))
