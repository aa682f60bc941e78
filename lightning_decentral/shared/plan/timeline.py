"""Discrete-event simulation of tasks on workers: start and finish of each task; makespan, bubble, Chrome trace.

start(task) = max(finish of the worker's previous task, finish of every task that it needs)"""

import json
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Task(Generic[Name]):
    """Task of `seconds` on one worker, which runs its tasks in the order in which they are listed."""

    name: Name  # unique name
    worker: str  # anything that runs one task at a time, such as a stage or a link
    seconds: float
    needs: tuple[Name, ...] = ()  # names of the tasks that must have finished


@dataclass(frozen=True)
class Span:
    """Start and finish of a task, in seconds since the beginning."""

    worker: str
    start: float
    finish: float


class Deadlock(ValueError):
    """Error: tasks wait for each other, or for a task that doesn't exist."""


def run(tasks: Sequence[Task[Name]]) -> dict[Name, Span]:
    """Simulate the tasks and return the start and finish of each one, by name. Deadlock: names the first task of each
    worker that can never start."""
    queues: dict[str, deque[Task[Name]]] = {}
    for task in tasks:
        queues.setdefault(task.worker, deque()).append(task)
    waiting: dict[Name, list[str]] = {}
    spans: dict[Name, Span] = {}
    free: dict[str, float] = {}
    ready = list(queues)
    while ready:
        worker = ready.pop()
        queue = queues[worker]
        while queue:
            task = queue[0]
            missing = next((name for name in task.needs if name not in spans), None)
            if missing is not None:  # when it has finished, this worker is ready again
                waiting.setdefault(missing, []).append(worker)
                break
            start = max([free.get(worker, 0.0), *(spans[name].finish for name in task.needs)])
            spans[task.name] = Span(worker, start, start + task.seconds)
            free[worker] = start + task.seconds
            ready.extend(waiting.pop(task.name, ()))
            queue.popleft()
    stuck = {worker: queue[0].name for worker, queue in queues.items() if queue}
    if stuck:
        raise Deadlock(f"these can never start: {', '.join(f'{w}: {n}' for w, n in stuck.items())}")
    return spans


def makespan(spans: Mapping[Name, Span]) -> float:
    """Return max finish - min start, in seconds; 0 without tasks."""
    if not spans:
        return 0.0
    return max(span.finish for span in spans.values()) - min(span.start for span in spans.values())


def bubble(spans: Mapping[Name, Span], workers: Iterable[str]) -> float:
    """Return the share of time that workers idle, 1 - (sum of busy seconds) / (number of workers * makespan)."""
    names = set(workers)
    whole = makespan({name: span for name, span in spans.items() if span.worker in names})
    busy = sum(span.finish - span.start for span in spans.values() if span.worker in names)
    return 1 - busy / (len(names) * whole) if whole else 0.0


def chrome_trace(spans: Mapping[Name, Span], process: str = "predicted") -> list[dict[str, object]]:
    """Return events for chrome://tracing or Perfetto: one row for each worker, times in microseconds."""
    return [
        {
            "name": str(name),
            "ph": "X",
            "pid": process,
            "tid": span.worker,
            "ts": 1e6 * span.start,
            "dur": 1e6 * (span.finish - span.start),
        }
        for name, span in spans.items()
    ]


def write_chrome_trace(events: Sequence[Mapping[str, object]], path: str | Path) -> None:
    """Write the events to a file that chrome://tracing and Perfetto open."""
    Path(path).write_text(json.dumps({"traceEvents": list(events), "displayTimeUnit": "ms"}))


def read_chrome_trace(path: str | Path) -> dict[str, Span]:
    """Read the spans of a Chrome trace file, by name. ValueError: the file is no such trace."""
    try:
        events = json.loads(Path(path).read_text())["traceEvents"]
        return {
            str(event["name"]): Span(str(event["tid"]), 1e-6 * event["ts"], 1e-6 * (event["ts"] + event["dur"]))
            for event in events
        }
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise ValueError(f"{path} is no trace ({type(error).__name__}: {error}): remove it") from None


def later(spans: Mapping[Name, Span], seconds: float) -> dict[Name, Span]:
    """Return the spans shifted by `seconds`."""
    return {name: Span(span.worker, span.start + seconds, span.finish + seconds) for name, span in spans.items()}
