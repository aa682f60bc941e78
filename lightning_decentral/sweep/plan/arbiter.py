"""Arbiter (scheduler) of a sweep: decides which member may use which device, by events alone: no clock, no socket.

A member requests a device, is granted one, and returns it within a quantum. Between two grants the member waits with
its parameters on the device, until another member needs the memory.

        running on a device:  peak bytes of the running member + sum of kept bytes of members waiting there <= memory
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from lightning_decentral.shared.plan.timeline import Span
from lightning_decentral.sweep.plan.policy import Job, Policy

# Two grants of one member with a shorter gap than this are one bar of a chart.
SEAM_SECONDS = 0.002


class Instruction(Enum):
    """Instruction that the arbiter gives to a member."""

    RUN = "run"
    ENTER = "enter"
    LEAVE = "leave"
    GO_ON = "go on"
    END = "end"


class Phase(Enum):
    """Phase of a member: AWAY on the host (data, checkpoints, start), WAITING for a device, RUNNING on a device."""

    AWAY = "away"
    WAITING = "waiting"
    RUNNING = "running"


@dataclass(frozen=True)
class TurnReport:
    """Report that a member sends when it returns a grant; None: not known yet."""

    progress: float | None = None  # fraction of all its work that is done, in 0..1
    remaining_seconds: float | None = None  # predicted device time until the member ends
    peak_bytes: int | None = None  # maximum that the member needed on the device
    kept_bytes: int = 0  # memory that stays on the device while the member waits
    piece_seconds: float | None = None  # of a forward and backward that has ended (JigSaw)


@dataclass
class MemberAccount:
    """The arbiter's account of one member."""

    name: str
    arrived: int
    width: int = 1  # devices that it needs at once, for as long as it trains
    home: tuple[str, ...] = ()  # the devices that it stays on; empty: any
    phase: Phase = Phase.AWAY
    devices: tuple[str, ...] = ()
    turn: TurnReport = TurnReport()
    resident: bool = False
    leaving: bool = False
    served: int = -1
    since: float = 0.0
    busy_seconds: float = 0.0
    spans: list[Span] = field(default_factory=list)

    def close(self, now: float) -> None:
        """Close the grant and add its devices' time until now to the member's."""
        for device in self.devices:
            self.busy_seconds += now - self.since
            start = self.since
            if self.spans and self.spans[-1].worker == device and start - self.spans[-1].finish < SEAM_SECONDS:
                start = self.spans.pop().start
            self.spans.append(Span(device, start, now))
        self.devices = ()


Orders = list[tuple[str, Instruction]]


class Arbiter:
    """Decides which members of a sweep may use which devices; a device has one running member at a time.

    On CUDA devices, and wherever memory is limited, a member stays on the devices where it started."""

    cores: Mapping[str, Sequence[int]] | None = None  # of each device, if a member's workers ask one by one; empty: any

    def __init__(
        self,
        policy: Policy,
        devices: Sequence[str],
        *,
        memory_bytes: int | None = None,  # of each device; None: no limit, and no member is ever evicted
        quantum_seconds: float = 0.25,  # how long a grant lasts
    ) -> None:
        self.policy, self.devices, self.memory_bytes = policy, tuple(devices), memory_bytes
        self.quantum_seconds = quantum_seconds
        self._pinned = memory_bytes is not None or any(device.startswith("cuda") for device in devices)
        self.members: dict[str, MemberAccount] = {}
        self.ended: dict[str, MemberAccount] = {}
        self.remarks: list[str] = []  # for the user, about what was decided; removed when shown
        self._grants = 0

    def next_start(self, left: Sequence[str], now: float) -> str | None:
        """Choose who starts next of those that are left, which are asked for often; None: nobody yet."""
        return next(iter(left), None)

    def lasts_seconds(self, width: int) -> float:
        """Seconds that a grant lasts; several devices are kept, as a member's workers would wait for each other."""
        return self.quantum_seconds if width == 1 else math.inf

    def join(self, name: str, width: int = 1) -> MemberAccount:
        """Add a member; members that stay on their devices get those with the fewest members. ValueError: more devices
        than the sweep has."""
        self.refuse_wider(name, width)
        homes = [device for member in self.members.values() for device in member.home]
        home = tuple(sorted(self.devices, key=homes.count)[:width]) if self._pinned else ()
        self.members[name] = MemberAccount(name, len(self.members) + len(self.ended), width, home)
        return self.members[name]

    def refuse_wider(self, name: str, width: int) -> None:
        """Raise ValueError if a member asks for more devices than the sweep has."""
        if width > len(self.devices):
            raise ValueError(
                f"member {name} asks for trainer.devices={width}, but the sweep has only "
                f"{', '.join(self.devices)}: raise hydra.launcher.devices or lower trainer.devices"
            )

    def request(self, name: str) -> None:
        """Record that the member waits for a device from now on."""
        self.members[name].phase = Phase.WAITING

    def give_back(self, name: str, turn: TurnReport, now: float) -> None:
        """Record that the member returns its grant; it may request again at once."""
        member = self.members[name]
        member.close(now)
        member.phase, member.turn = Phase.AWAY, turn

    def left(self, name: str) -> None:
        """Record that the member has nothing on its device any more."""
        self.members[name].resident = self.members[name].leaving = False

    def gone(self, name: str, now: float) -> None:
        """Record that a process with a connection is gone; its member may be alive."""
        self.give_back(name, self.members[name].turn, now)
        self.left(name)

    def leave(self, name: str, now: float) -> None:
        member = self.members.pop(name)
        member.close(now)
        self.ended[name] = member

    def settle(self, now: float) -> Orders:
        """Decide which members run, leave or load: call it after every event, or after all simultaneous events."""
        return [*self._fill(now), *self._prepare()]

    def rests_seconds(self, now: float) -> float:
        """Seconds until `settle` must be called again even without an event."""
        return math.inf

    def seats(self, name: str) -> Sequence[str]:
        """Names under which a member's processes ask."""
        return (name,)

    def place(self, name: str) -> str | None:
        """Device that was granted to one worker, where workers ask one by one."""
        return None

    def jobs(self, *phases: Phase) -> list[Job]:
        """Describe the members in these phases for a policy."""
        known = [m.turn.remaining_seconds for m in self.members.values() if m.turn.remaining_seconds is not None]
        expected = sum(known) / len(known) if known else 0.0
        return [self.seen(member, expected) for member in self.members.values() if member.phase in phases]

    def seen(self, member: MemberAccount, expected: float) -> Job:
        """Describe a member for a policy; before its first turn, it is as long as expected: the mean of the others."""
        known = member.turn.remaining_seconds
        remaining = expected if known is None else known
        piece = min(remaining, self.quantum_seconds)
        # A member that has had a turn and still can't predict (a fit without an end) isn't preferred again.
        measured = known is not None or member.served >= 0
        return Job(member.name, member.arrived, remaining, piece, member.served, measured)

    def _fill(self, now: float) -> Iterator[tuple[str, Instruction]]:
        """Give free devices to the waiting members that the policy prefers."""
        taken = {device for member in self.members.values() for device in member.devices}
        free = [device for device in self.devices if device not in taken]
        waiting = self.jobs(Phase.WAITING)
        while free and waiting:
            job = self.policy.choose(waiting, self.jobs(Phase.RUNNING))
            waiting.remove(job)
            member = self.members[job.name]
            wanted = [device for device in free if not member.home or device in member.home][: member.width]
            if not wanted:
                continue
            # A member that needs several devices, or memory that others must free first, blocks those after it.
            free = [device for device in free if device not in wanted]
            if len(wanted) == member.width:
                yield from self._admit(member, tuple(wanted), now)

    def _admit(self, member: MemberAccount, devices: tuple[str, ...], now: float) -> Iterator[tuple[str, Instruction]]:
        """Run the member, if there is memory; otherwise ask other members to leave."""
        leaving = self._in_the_way(member)
        if leaving:
            for other in leaving:
                if not other.leaving and other.phase is Phase.WAITING:
                    other.leaving = True
                    yield other.name, Instruction.LEAVE
            return  # the member still waits: when the others have left, `settle` comes here again
        member.phase, member.devices, member.resident = Phase.RUNNING, devices, True
        member.served, member.since, self._grants = self._grants, now, self._grants + 1
        yield member.name, Instruction.RUN

    def _in_the_way(self, member: MemberAccount) -> list[MemberAccount]:
        """Members that must leave before it runs, least preferred first; an unmeasured member runs alone."""
        if self.memory_bytes is None:
            return []
        neighbours = [other for other in self._neighbours(member) if other.resident]
        peak = member.turn.peak_bytes
        if peak is None:
            return neighbours
        jobs = [job for job in self.jobs(*Phase) if self.members[job.name] in neighbours]
        rank = {job.name: (self.policy.key(job, jobs, ()), job.arrived) for job in jobs}
        # Members that leave already, then waiting members: others can't be asked to leave.
        order = sorted(neighbours, key=lambda m: (m.leaving, m.phase is Phase.WAITING, rank[m.name]), reverse=True)
        excess = peak + sum(other.turn.kept_bytes for other in neighbours) - self.memory_bytes
        for count, other in enumerate(order):
            if excess <= 0:
                return order[:count]
            excess -= other.turn.kept_bytes
        return order

    def _neighbours(self, member: MemberAccount) -> list[MemberAccount]:
        return [m for m in self.members.values() if m is not member and set(m.home) & set(member.home)]

    def _prepare(self) -> Iterator[tuple[str, Instruction]]:
        """Load the next member's parameters while another runs, if both have memory (double buffering)."""
        if self.memory_bytes is None:
            return
        for running in [member for member in self.members.values() if member.phase is Phase.RUNNING]:
            neighbours = self._neighbours(running)
            waiting = [job for job in self.jobs(Phase.WAITING) if self.members[job.name] in neighbours]
            if not waiting or running.turn.peak_bytes is None:  # how much memory an unmeasured member leaves is unknown
                continue
            after = self.members[self.policy.choose(waiting, ()).name]
            there = running.turn.peak_bytes + sum(m.turn.kept_bytes for m in neighbours if m.resident)
            if not after.resident and there + after.turn.kept_bytes <= self.memory_bytes:
                after.resident = after.turn.peak_bytes is not None  # an unmeasured member loads when it runs, alone
                if after.resident:
                    yield after.name, Instruction.ENTER

    def spans(self) -> dict[str, Span]:
        """Spans of all members' time on devices, as `member/number`."""
        everyone: Mapping[str, MemberAccount] = {**self.ended, **self.members}
        return {f"{name}/{i}": span for name, member in everyone.items() for i, span in enumerate(member.spans)}
