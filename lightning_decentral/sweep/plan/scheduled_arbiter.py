"""Arbiter for `schedule --run`: carries out a schedule with real trainings, and measures the steps of its jobs.

Every batch is its own grant, like every piece in a simulation."""

import math
from collections.abc import Sequence
from itertools import pairwise

from lightning_decentral.shared.plan.timeline import Span
from lightning_decentral.sweep.plan.arbiter import Arbiter, MemberAccount, Orders, TurnReport
from lightning_decentral.sweep.plan.dispatch import Processor, Queue, remaining_seconds
from lightning_decentral.sweep.plan.policy import Job, Policy
from lightning_decentral.sweep.plan.simulation import Ran, Spans

EVERY_BATCH = 0.0  # a quantum of 0 seconds ends after one batch


class Scheduled(Arbiter):
    """Arbiter whose members are jobs: they arrive as the jobs do, and policies see what a simulation shows.

    No device is granted before all members have asked for one: then the clock starts, so no process start is counted.
    """

    def __init__(self, queues: Sequence[Queue], policy: Policy, devices: Sequence[str]) -> None:
        super().__init__(policy, devices, quantum_seconds=EVERY_BATCH)
        self.opened = math.inf  # when the clock started; infinite before
        self._queues = {queue.name: queue for queue in queues}
        self._remaining = {queue.name: remaining_seconds(queue) for queue in queues}
        self._absent, self._asking = set(self._queues), list[str]()
        self._until: dict[str, dict[int, float]] = {}

    def request(self, name: str) -> None:
        self._absent.discard(name)
        self._asking.append(name)

    def give_back(self, name: str, turn: TurnReport, now: float) -> None:
        super().give_back(name, turn, now)
        # Its earlier request is void: the member may have ended without a message.
        self._asking = [other for other in self._asking if other != name]
        until = self._until.setdefault(name, {0: 0.0})
        # A step counts when it is first done: accumulated batches report the step before again.
        done = round((turn.progress or 0.0) * len(self._queues[name].pieces))
        until.setdefault(done, self.members[name].busy_seconds)

    def leave(self, name: str, now: float) -> None:
        super().leave(name, now)
        self._absent.discard(name)  # the others don't wait for a member that failed at its start
        self._asking = [other for other in self._asking if other != name]

    def settle(self, now: float) -> Orders:
        if not self._absent:
            self.opened = min(self.opened, now)
        for name in [name for name in self._asking if self._due(name) <= now]:
            self._asking.remove(name)
            super().request(name)
        return super().settle(now)

    def rests_seconds(self, now: float) -> float:
        return max(0.0, min((self._due(name) - now for name in self._asking), default=math.inf))

    def _due(self, name: str) -> float:
        return self.opened + self._queues[name].arrival_seconds

    def seen(self, member: MemberAccount, expected: float) -> Job:
        pieces, remaining = self._queues[member.name].pieces, self._remaining[member.name]
        done = min(round((member.turn.progress or 0.0) * len(pieces)), len(pieces) - 1)
        return Job(member.name, member.arrived, remaining[done], pieces[done].compute_seconds, member.served)

    def ran(self, rows: Sequence[Processor]) -> Spans:
        """Spans of all members on a simulation's devices, in seconds since all members had started. ValueError: a
        member ended before its last piece."""
        for name, member in self.ended.items():
            refuse_early(name, member.turn.progress or 0.0)
        row = dict(zip(self.devices, (device.name for device in rows), strict=True))
        return {
            Ran(name, number): Span(row[span.worker], span.start - self.opened, span.finish - self.opened)
            for name, member in self.ended.items()
            for number, span in enumerate(member.spans)
        }

    def step_seconds(self, name: str, number: int, *, first: int) -> list[float]:
        """Device seconds of `number` steps of a job whose member has ended:

            seconds of step k = grants until k steps were done - grants until k - 1 were

        The `first` steps, slower than others, keep their seconds; the others get their mean. ValueError: fewer steps
        than required, or several in a batch."""
        until, steps = self._until.get(name, {}), len(self._queues[name].pieces)
        refuse_early(name, max(until, default=0) / steps)
        if len(until) <= steps:
            raise ValueError(f"job {name} makes several steps in a batch, as with two optimizers: leave it out")
        stamps = [until[step] for step in sorted(until)]
        seconds = [after - before for before, after in pairwise(stamps)]
        alone, others = seconds[:first][:number], seconds[first:]
        return [*alone, *[sum(others) / len(others)] * (number - len(alone))]


def refuse_early(name: str, progress: float) -> None:
    """ValueError for a job that ended before its last step."""
    if progress < 1:
        raise ValueError(f"job {name} ended after {progress:.0%} of its steps: leave out what stops it early")
