"""Arbiters of SPASE: `Trials` extrapolates short trials, `Allocated` gives members the devices of a plan."""

from collections.abc import Mapping, Sequence

from lightning_decentral.shared.plan.timeline import Span
from lightning_decentral.sweep.plan.arbiter import Arbiter, Instruction, MemberAccount, Orders, TurnReport
from lightning_decentral.sweep.plan.policy import FIFO
from lightning_decentral.sweep.plan.spase import TOLERANCE, Granted, Table, planned, replayed_seconds

WARM = 3  # first steps of a trial, slower than others: they are taken as they are


class Alone(Arbiter):
    """Arbiter whose members have their devices to themselves from the start of their process to its end, and report
    after each quantum, on several devices, too."""

    def __init__(self, devices: Sequence[str], quantum_seconds: float) -> None:
        super().__init__(FIFO(), devices, quantum_seconds=quantum_seconds)
        self._held: dict[str, tuple[tuple[str, ...], float]] = {}  # {member: its devices, and since when}

    def lasts_seconds(self, width: int) -> float:
        return self.quantum_seconds

    def join(self, name: str, width: int = 1) -> MemberAccount:
        account = super().join(name, len(self._held[name][0]))
        account.home = self._held[name][0]
        return account

    def leave(self, name: str, now: float) -> None:
        super().leave(name, now)
        devices, since = self._held[name]
        self.ended[name].spans = [Span(device, since, now) for device in devices]

    def taken(self) -> set[str]:
        return {device for member in self.members.values() for device in member.home}


class Trials(Alone):
    """Arbiter that ends each trial after `steps` steps, or when its time is over, and predicts the whole job's seconds:

        t_1 - t_0 + (1 - p_1) (t_2 - t_1) / (p_2 - p_1)

    The process started at t_0; a share p_1 of all steps was done at t_1, after the first, slower steps, p_2 at t_2."""

    def __init__(self, widths: Mapping[str, int], devices: Sequence[str], steps: int, limit_seconds: float) -> None:
        super().__init__(devices, quantum_seconds=0.0)
        self._widths, self._steps, self._limit_seconds = widths, WARM + steps, limit_seconds
        self._stamps: dict[str, list[tuple[float, float]]] = {name: [] for name in widths}

    def next_start(self, left: Sequence[str], now: float) -> str | None:
        free = [device for device in self.devices if device not in self.taken()]
        name = next((name for name in left if self._widths[name] <= len(free)), None)
        if name is not None:
            self._held[name] = tuple(free[: self._widths[name]]), now
        return name

    def give_back(self, name: str, turn: TurnReport, now: float) -> None:
        super().give_back(name, turn, now)
        stamps, progress = self._stamps[name], turn.progress or 0.0
        if progress > (stamps[-1][0] if stamps else 0.0):  # accumulated batches repeat a step
            stamps.append((progress, now))

    def settle(self, now: float) -> Orders:
        enough = {name for name in self.members if len(self._stamps[name]) >= self._steps}
        late = {name for name in self.members if now - self._held[name][1] > self._limit_seconds}
        return [*super().settle(now), *((name, Instruction.END) for name in enough | late)]

    def seconds(self, name: str, complete: bool) -> float:
        """Predict the seconds of an ended trial's whole job, from the start of its process to its end. ValueError: too
        few steps, unless the job is complete."""
        stamps, span = self._stamps[name], self.ended[name].spans[0]
        if len(stamps) >= self._steps:
            (before, first), (after, last) = stamps[WARM - 1], stamps[-1]
            return first - span.start + (1 - before) * (last - first) / (after - before)
        if not complete:
            raise ValueError(f"{len(stamps)} steps of {self._steps} within {span.finish - span.start:.3g} s")
        return span.finish - span.start


class Allocated(Alone):
    """Arbiter whose members start in the order and on the devices of a plan. At intervals, and when a member ends, the
    plan is made anew for those that haven't started: the others keep their devices for as long as they predict. The new
    plan counts where it ends sooner."""

    def __init__(
        self,
        tables: Sequence[Table],
        devices: Sequence[str],
        *,
        interval_seconds: float,
        quantum_seconds: float = 0.25,
        solver_seconds: float = 1.0,  # in which members may wait for their next quantum
    ) -> None:
        super().__init__(devices, quantum_seconds)
        self._tables = {table.name: table for table in tables}
        self._interval_seconds, self._solver_seconds, self._due = interval_seconds, solver_seconds, interval_seconds
        self.plan = planned(tables, len(devices), limit_seconds=solver_seconds)  # the first one
        self._left = {job.name: job for job in self.plan.in_order()}
        self.started: dict[str, Granted] = {}
        self.changes = 0

    def next_start(self, left: Sequence[str], now: float) -> str | None:
        if now >= self._due:
            self._renew(now)
        taken = self.taken()
        for job in self._left.values():
            mine = tuple(self.devices[g] for g in job.devices)
            if not taken.intersection(mine):
                self._held[job.name] = mine, now
                self.started[job.name] = self._left.pop(job.name)
                return job.name
            taken.update(mine)  # those after it keep the order of each device
        return None

    def leave(self, name: str, now: float) -> None:
        super().leave(name, now)
        self._due = now

    def _renew(self, now: float) -> None:
        self._due = now + self._interval_seconds
        if not self._left:
            return
        ends = {device: self._left_seconds(member, now) for member in self.members.values() for device in member.home}
        free = [ends.get(device, 0.0) for device in self.devices]
        new = planned([self._tables[name] for name in self._left], len(free), free, self._solver_seconds)
        if new.makespan_seconds < (1 - TOLERANCE) * replayed_seconds(list(self._left.values()), free):
            self._left = {job.name: job for job in new.in_order()}
            self.changes += 1

    def _left_seconds(self, member: MemberAccount, now: float) -> float:
        """Predict the seconds until a running member ends: by what it measured, before its first report by the plan."""
        if member.turn.remaining_seconds is not None:
            return max(0.0, member.turn.remaining_seconds - (now - member.since))
        return max(0.0, self._held[member.name][1] + self.started[member.name].seconds - now)
