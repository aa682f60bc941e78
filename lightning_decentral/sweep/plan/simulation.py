"""Simulation of a schedule, event by event: how long many jobs take on few devices under a policy; measures, bounds.

One device, pieces 1..n in the order in which it computes them, each loaded while the one before computes:

    T = load_1 + sum_i max(compute_i, load_(i+1)),   load_(n+1) = 0

Source: double buffering of Nagrecha et al. 2110.08633."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_decentral.shared.plan.timeline import Span
from lightning_decentral.sweep.plan.dispatch import Dispatch, Processor, Queue, WorkPiece
from lightning_decentral.sweep.plan.policy import Policy

INSTANT_SECONDS = 1e-9  # closer events happen at one moment: sums of floats differ in their last digit


@dataclass(frozen=True)
class Ran:
    """Piece of a job that ran on a device, or its loading."""

    job: str
    piece: int
    load: bool = False

    def __str__(self) -> str:
        return f"{'load ' if self.load else ''}{self.job} {self.piece}"


Spans = dict[Ran, Span]


def row(device: Processor, load: bool) -> str:
    """Name of the span's worker: a device computes and loads at the same time."""
    return f"{device.name} loads" if load else device.name


def simulate(queues: Sequence[Queue], devices: Sequence[Processor], policy: Policy) -> Spans:
    """Simulate a schedule and return the spans in which each piece is loaded and computed, and where.

    ValueError: no jobs, two of one name, or one that needs more memory than any device has."""
    dispatch = Dispatch(queues, devices, policy)
    # (time, device, job, whether a load): the end of a load or of a piece; an arrival has device -1.
    events = [(queue.arrival_seconds, -1, job, False) for job, queue in enumerate(queues)]
    heapq.heapify(events)
    spans: Spans = {}
    while events:
        moment = events[0][0] + INSTANT_SECONDS
        while events and events[0][0] <= moment:  # all events of a moment are recorded before any decision
            now = events[0][0]
            _, device, job, load = heapq.heappop(events)
            if device < 0:
                dispatch.arrive(job)
            elif load:
                dispatch.loaded(device)
            else:
                dispatch.finished(device)
        for order in dispatch.orders():
            piece = queues[order.job].pieces[order.piece]
            finish = now + (piece.load_seconds if order.load else piece.compute_seconds)
            ran = Ran(queues[order.job].name, order.piece, order.load)
            spans[ran] = Span(row(devices[order.device], order.load), now, finish)
            heapq.heappush(events, (finish, order.device, order.job, order.load))
    assert dispatch.over
    return spans


# ---- measures ---------------------------------------------------------------------------------------------------


def computed(spans: Mapping[Ran, Span]) -> Spans:
    """Select the spans of computing, without loading."""
    return {ran: span for ran, span in spans.items() if not ran.load}


def finish_seconds(spans: Mapping[Ran, Span]) -> dict[str, float]:
    """Finish of each job in seconds: when its last piece ends."""
    found: dict[str, float] = {}
    for ran, span in spans.items():
        found[ran.job] = max(found.get(ran.job, 0.0), span.finish)
    return found


def makespan_seconds(queues: Sequence[Queue], spans: Mapping[Ran, Span]) -> float:
    """Makespan in seconds: max finish - min arrival."""
    return max(finish_seconds(spans).values()) - min(queue.arrival_seconds for queue in queues)


def mean_completion_seconds(queues: Sequence[Queue], spans: Mapping[Ran, Span]) -> float:
    """Mean completion time in seconds: mean over jobs of (finish - arrival)."""
    finish = finish_seconds(spans)
    return sum(finish[queue.name] - queue.arrival_seconds for queue in queues) / len(queues)


def busy_fraction(queues: Sequence[Queue], spans: Mapping[Ran, Span], devices: Sequence[Processor]) -> float:
    """Fraction of device time spent computing: sum of computing / (devices makespan); 1 if nothing takes time."""
    whole = makespan_seconds(queues, spans) * len(devices)
    return sum(span.finish - span.start for span in computed(spans).values()) / whole if whole else 1.0


# ---- bounds -----------------------------------------------------------------------------------------------------


def pipelined_seconds(pieces: Sequence[WorkPiece]) -> float:
    """Seconds of one device for these pieces in this order: load_1 + sum_i max(compute_i, load_(i+1))."""
    loads = [*(piece.load_seconds for piece in pieces[1:]), 0.0]
    return pieces[0].load_seconds + sum(max(p.compute_seconds, load) for p, load in zip(pieces, loads, strict=True))


def lower_bound_seconds(queues: Sequence[Queue], devices: Sequence[Processor]) -> float:
    """Lower bound of the makespan under any policy:

        max( max_j (arrival_j + T_j), max_r (r + sum of compute of jobs that arrive at r or later / m) ) - first arrival

    T_j is job j alone on one device. On unit pieces without loading it is max(max p, sum p / m)."""
    arrivals = [queue.arrival_seconds for queue in queues]
    alone = max(queue.arrival_seconds + pipelined_seconds(queue.pieces) for queue in queues)
    late = [(r, [p for q in queues if q.arrival_seconds >= r for p in q.pieces]) for r in arrivals]
    shared = max(r + sum(piece.compute_seconds for piece in pieces) / len(devices) for r, pieces in late)
    return max(alone, shared) - min(arrivals)
