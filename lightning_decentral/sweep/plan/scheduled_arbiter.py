"""Arbiters for `schedule --run`: one measures the steps of all jobs, one carries the schedule out.

Every batch is a grant of its own, as every piece of a simulation is.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_decentral.shared.plan.timeline import Span
from lightning_decentral.sweep.plan.arbiter import Arbiter, MemberAccount, Orders, TurnReport
from lightning_decentral.sweep.plan.dispatch import Processor, Queue, remaining_seconds
from lightning_decentral.sweep.plan.policy import Job, Policy, RoundRobin
from lightning_decentral.sweep.plan.simulation import Ran, Spans

EVERY_BATCH = 0.0  # a quantum of so many seconds is over after one


@dataclass(frozen=True)
class Steps:
    """Seconds on the device of a training's steps: the first ones, slower than others, one by one, then the mean."""

    first_seconds: tuple[float, ...]
    other_seconds: float

    def seconds(self, number: int) -> list[float]:
        first = self.first_seconds[:number]
        return [*first, *[self.other_seconds] * (number - len(first))]


class Gathered(Arbiter):
    """Grants no device before all members have asked for one: the clock starts then, and nobody's start is counted.

    Args:
        arrivals: seconds on that clock by member; it waits for a device from then on.

    Attributes:
        opened: when the clock started; infinite before.
    """

    def __init__(
        self, policy: Policy, devices: Sequence[str], arrivals: Mapping[str, float], *, pinned: bool = False
    ) -> None:
        super().__init__(policy, devices, pinned=pinned, quantum_seconds=EVERY_BATCH)
        self.opened = math.inf
        self._arrivals, self._absent = arrivals, set(arrivals)
        self._asking: list[str] = []

    def request(self, name: str) -> Orders:
        self._absent.discard(name)
        self._asking.append(name)
        return []

    def give_back(self, name: str, turn: TurnReport, now: float) -> None:
        super().give_back(name, turn, now)
        # What it asked for before is over: it may have ended without a message.
        self._asking = [other for other in self._asking if other != name]

    def leave(self, name: str, now: float) -> None:
        super().leave(name, now)
        self._absent.discard(name)  # the others don't wait for one that failed at its start
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
        return self.opened + self._arrivals[name]


class Timing(Gathered):
    """Members in turn, each for the same number of steps, and what those took them.

        seconds of step k = grants until k steps were done - grants until k - 1 were

    Args:
        first: steps that are kept one by one.
        steps: of each member, the first ones among them.
    """

    def __init__(
        self, names: Iterable[str], devices: Sequence[str], *, first: int, steps: int, pinned: bool = False
    ) -> None:
        super().__init__(RoundRobin(), devices, dict.fromkeys(names, 0.0), pinned=pinned)
        self._first, self._steps = first, steps
        self._until: dict[str, dict[int, float]] = {}

    def give_back(self, name: str, turn: TurnReport, now: float) -> None:
        super().give_back(name, turn, now)
        until = self._until.setdefault(name, {0: 0.0})
        # Of a step, the first time that it is done: accumulated batches report the step before again.
        until.setdefault(round(self._steps * (turn.progress or 0.0)), self.members[name].busy_seconds)

    def steps_of(self, name: str) -> Steps:
        """Device seconds of each step of a member that has ended.

        Raises:
            ValueError: it made fewer steps than it should have, or several in a batch.
        """
        until = self._until.get(name, {})
        _refuse_early(name, max(until, default=0) / self._steps)
        if len(until) <= self._steps:
            raise ValueError(f"job {name} makes several steps in a batch, as with two optimizers: leave it out")
        stamps = [until[step] for step in sorted(until)]
        seconds = [after - before for before, after in pairwise(stamps)]
        others = seconds[self._first :]
        return Steps(tuple(seconds[: self._first]), sum(others) / len(others))


class Scheduled(Gathered):
    """Members that are jobs: they arrive as the jobs do, and policies see what they see in a simulation."""

    def __init__(
        self, queues: Sequence[Queue], policy: Policy, devices: Sequence[str], *, pinned: bool = False
    ) -> None:
        super().__init__(policy, devices, {queue.name: queue.arrival_seconds for queue in queues}, pinned=pinned)
        self._queues = {queue.name: queue for queue in queues}
        self._remaining = {queue.name: remaining_seconds(queue) for queue in queues}

    def seen(self, member: MemberAccount, expected: float) -> Job:
        pieces, remaining = self._queues[member.name].pieces, self._remaining[member.name]
        done = min(round((member.turn.progress or 0.0) * len(pieces)), len(pieces) - 1)
        return Job(member.name, member.arrived, remaining[done], pieces[done].compute_seconds, member.served)

    def ran(self, rows: Sequence[Processor]) -> Spans:
        """Every stretch of every member in the rows of a simulation's devices, in seconds since all were there.

        Raises:
            ValueError: one ended before its last piece.
        """
        for name, member in self.ended.items():
            _refuse_early(name, member.turn.progress or 0.0)
        row = dict(zip(self.devices, (device.name for device in rows), strict=True))
        return {
            Ran(name, number): Span(row[span.worker], span.start - self.opened, span.finish - self.opened)
            for name, member in self.ended.items()
            for number, span in enumerate(member.spans)
        }


def _refuse_early(name: str, progress: float) -> None:
    if progress < 1:
        raise ValueError(f"job {name} ended after {progress:.0%} of its steps: leave out what stops it early")
