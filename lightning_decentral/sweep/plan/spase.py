"""SPASE (select parallelism, allocate, schedule): how many devices each job gets, which, and when.

    min max_j (s_j + sum_k t_jk x_jk)      x_jk: job j runs on k devices, for t_jk seconds, without a break

Two jobs that share a device run one after the other. Each job's table {devices: seconds} comes from short trials of the
best way to run it on that many devices; other numbers of devices aren't considered. A device that still runs earlier
jobs is `free` in so many seconds.

Source: select parallelism, allocate, schedule: Saturn, Nagrecha and Kumar 2309.01226."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import combinations, pairwise, product
from math import isfinite

from lightning_decentral.shared.plan.arguments import checked
from lightning_decentral.shared.plan.timeline import Span
from lightning_decentral.sweep.plan.milp import MILP, NoSolution

TOLERANCE = 1e-4  # of a gap: the solver is off by 1e-6 of M in each of the rows that add up to a makespan


@checked
@dataclass(frozen=True)
class Table:
    """Table of a job: {number of devices: seconds of the whole job}, and its parallelism there."""

    name: str
    seconds: Mapping[int, float]
    parallelism: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        wrong = {k: s for k, s in self.seconds.items() if k < 1 or not (isfinite(s) and s > 0)}
        if not self.seconds or wrong:
            raise ValueError(f"job {self.name} must map 1 or more devices to seconds above 0, got {dict(self.seconds)}")

    def within(self, devices: int) -> "Table":
        """Drop entries that need more devices; ValueError if nothing is left."""
        found = {k: s for k, s in self.seconds.items() if k <= devices}
        if not found:
            raise ValueError(f"job {self.name} needs {min(self.seconds)} devices, but there are {devices}")
        return Table(self.name, found, self.parallelism)

    def at_least(self, devices: int) -> int:
        """Return the next number of devices that the table has, or its largest."""
        return min((k for k in self.seconds if k >= devices), default=max(self.seconds))

    def cheapest(self, most: float) -> int:
        """Return the number of devices with the fewest device-seconds, of those that take `most` seconds at most."""
        return min((k for k, s in self.seconds.items() if s <= most), key=lambda k: (k * self.seconds[k], k))


@dataclass(frozen=True)
class Granted:
    """Devices that a job gets (numbers from 0), and when."""

    name: str
    devices: tuple[int, ...]
    start: float
    seconds: float


@dataclass(frozen=True)
class SpasePlan:
    """Plan of all jobs: each job's devices and time."""

    granted: tuple[Granted, ...]
    bound_seconds: float  # proven: no plan is shorter
    how: str  # the algorithm that found it
    busy_seconds: float = 0.0  # how long earlier jobs run

    @property
    def gap(self) -> float:
        """(makespan - proven bound) / makespan; 0 where no plan is shorter, up to the solver's tolerance."""
        gap = (self.makespan_seconds - self.bound_seconds) / self.makespan_seconds
        return gap if gap > TOLERANCE else 0.0

    @property
    def makespan_seconds(self) -> float:
        return max(self.last_seconds, self.busy_seconds)

    @property
    def last_seconds(self) -> float:
        return max(job.start + job.seconds for job in self.granted)

    def in_order(self) -> list[Granted]:
        return sorted(self.granted, key=lambda job: (job.start, job.devices))

    def spans(self) -> dict[tuple[str, int], Span]:
        return {
            (job.name, device): Span(f"device {device}", job.start, job.start + job.seconds)
            for job in self.granted
            for device in job.devices
        }


def lower_bound_seconds(tables: Sequence[Table], devices: int, free: Sequence[float] = ()) -> float:
    """Lower bound of the makespan: max( f_m, max_j min_k (f_k + t_jk), (sum_g f_g + sum_j min_k k t_jk) / m ), where
    f_g is when device g is free, in ascending order."""
    known = sorted(free) or [0.0] * devices
    longest = max(min(known[k - 1] + s for k, s in table.seconds.items()) for table in tables)
    work = sum(min(k * s for k, s in table.seconds.items()) for table in tables)
    return max(known[-1], longest, (sum(known) + work) / devices)


def _fitting(tables: Sequence[Table], devices: int) -> list[Table]:
    """Drop table entries that need more devices. ValueError: no jobs, two with one name, or one that doesn't fit."""
    names = [table.name for table in tables]
    if not tables or len(set(names)) < len(names):
        raise ValueError(f"jobs must be one or more of different names, got {names}")
    return [table.within(devices) for table in tables]


@dataclass(frozen=True)
class GreedySpase:
    """Greedy scheduler: for every threshold T of the tables, each job gets the fewest device-seconds with time at most
    T. The longest job is placed first, on the devices that are free first. The best T is used, or a number of devices
    that all jobs get, where that is shorter: k, or the next in a job's table.

    Source: the thresholds of Turek, Wolf and Yu 1992."""

    def plan(self, tables: Sequence[Table], devices: int, free: Sequence[float] = ()) -> SpasePlan:
        """Plan the jobs on equal devices; ValueError for no jobs, two with one name, or one that needs more devices
        than exist."""
        tables = _fitting(tables, devices)
        shortest = max(min(table.seconds.values()) for table in tables)
        thresholds = sorted({s for table in tables for s in table.seconds.values() if s >= shortest})
        equal = [[table.at_least(k) for table in tables] for k in range(1, devices + 1)]
        found = [[table.cheapest(most) for table in tables] for most in thresholds]
        bound, plans = lower_bound_seconds(tables, devices, free), []
        for sizes in [*found, *equal]:
            longest = sorted(range(len(tables)), key=lambda j: -tables[j].seconds[sizes[j]])
            granted = _placed(tables, devices, {j: sizes[j] for j in longest}, free=free)
            plans.append(SpasePlan(granted, bound, "greedy", max(free, default=0.0)))
        return min(plans, key=lambda plan: (plan.makespan_seconds, plan.last_seconds))


@dataclass(frozen=True)
class ExactSpase:
    """Exact scheduler for few jobs by a mixed-integer program; `gap` bounds its distance from the optimum.

    Needs scipy (extra `schedule`). Returns the better of it and `GreedySpase`, with the gap left at the time limit."""

    limit_seconds: float = 10.0

    def plan(self, tables: Sequence[Table], devices: int, free: Sequence[float] = ()) -> SpasePlan:
        """Plan the jobs on equal devices, with the errors of `GreedySpase.plan`."""
        tables = _fitting(tables, devices)
        greedy = GreedySpase().plan(tables, devices, free)
        if greedy.gap == 0:
            return greedy
        try:
            granted, bound = self._solved(tables, devices, greedy.makespan_seconds, free)
        except NoSolution:
            return greedy
        bound = max(bound, lower_bound_seconds(tables, devices, free))
        plans = replace(greedy, granted=granted, bound_seconds=bound, how="milp"), replace(greedy, bound_seconds=bound)
        return min(plans, key=lambda plan: plan.makespan_seconds)

    def _solved(
        self, tables: Sequence[Table], devices: int, most: float, free: Sequence[float]
    ) -> tuple[tuple[Granted, ...], float]:
        """(grants, bound) of the program, with C, s_j, x_jk, a_jg (job j has device g), o_ij (i runs before j), M the
        greedy makespan `most`:

        sum_k x_jk = 1                     sum_g a_jg = sum_k k x_jk               sum_jk k t_jk x_jk + sum f <= m C
        s_j + d_j <= C                     d_j = sum_k t_jk x_jk                   f_g a_jg <= s_j, f_g <= C
        s_i + d_i <= s_j + M (3 - o_ij - a_ig - a_jg)
        s_j + d_j <= s_i + M (2 + o_ij - a_ig - a_jg)"""
        p = MILP()
        # No bounds of `most` on these: with them HiGHS 1.12 cuts off best points that lie on one.
        end = p.variable(cost=1.0)
        start = [p.variable() for _ in tables]
        runs = [{k: p.binary() for k in table.seconds} for table in tables]
        has = [[p.binary() for _ in range(devices)] for _ in tables]
        lasts = [{x: table.seconds[k] for k, x in row.items()} for table, row in zip(tables, runs, strict=True)]
        for j, row in enumerate(runs):
            p.equal(dict.fromkeys(row.values(), 1.0), 1.0)
            p.equal({**dict.fromkeys(has[j], 1.0), **{x: -float(k) for k, x in row.items()}}, 0.0)
            p.at_most({start[j]: 1.0, **lasts[j], end: -1.0}, 0.0)
        # Every plan satisfies this row; without it the relaxation's bound, in which M forbids little, is weak.
        area = {x: k * table.seconds[k] for table, row in zip(tables, runs, strict=True) for k, x in row.items()}
        p.at_most({**area, end: -float(devices)}, -sum(free))
        for j, g in product(range(len(tables)), range(len(free))):
            p.at_most({has[j][g]: free[g], start[j]: -1.0}, 0.0)
        p.at_most({end: -1.0}, -max(free, default=0.0))
        for i, j in combinations(range(len(tables)), 2):
            before = p.binary()
            for both in zip(has[i], has[j], strict=True):
                shared = dict.fromkeys(both, most)
                p.at_most({start[i]: 1.0, **lasts[i], start[j]: -1.0, before: most, **shared}, 3 * most)
                p.at_most({start[j]: 1.0, **lasts[j], start[i]: -1.0, before: -most, **shared}, 2 * most)
        # Devices are equal where all are free: the first job gets the first ones. Without this row HiGHS 1.12 calls
        # some worse plans optimal.
        for one, other in pairwise(has[0] if not any(free) else ()):
            p.at_most({other: 1.0, one: -1.0}, 0.0)
        value, bound = p.solve(self.limit_seconds)  # exact to its tolerance only: devices and their order count
        has_devices = [[g for g, x in enumerate(row) if value[x] > 0.5] for row in has]
        order = sorted(range(len(tables)), key=lambda j: value[start[j]])
        sizes = {j: len(has_devices[j]) for j in order}
        return _placed(tables, devices, sizes, has_devices, free), bound


def planned(
    tables: Sequence[Table], devices: int, free: Sequence[float] = (), limit_seconds: float = 10.0
) -> SpasePlan:
    """Plan with the program where scipy is installed, otherwise greedily."""
    solver = ExactSpase(limit_seconds) if find_spec("scipy") else GreedySpase()
    return solver.plan(tables, devices, free)


def replayed_seconds(granted: Sequence[Granted], free: Sequence[float]) -> float:
    """Makespan of the same jobs on the same devices in this order, from when each device is free."""
    until = list(free)
    for job in granted:
        end = max(until[g] for g in job.devices) + job.seconds
        until = [end if g in job.devices else seconds for g, seconds in enumerate(until)]
    return max(until)


def _placed(
    tables: Sequence[Table],
    devices: int,
    sizes: Mapping[int, int],
    chosen: Sequence[Sequence[int]] | None = None,
    free: Sequence[float] = (),
) -> tuple[Granted, ...]:
    """Place jobs one after the other, each as early as its devices are free. `sizes` is {job: number of devices} in
    that order; `chosen` has each job's devices, or is None for those that are free first."""
    until = list(free) or [0.0] * devices
    found = {}
    for j, size in sizes.items():
        earliest = sorted(range(devices), key=lambda g: until[g])[:size]
        mine = tuple(sorted(earliest) if chosen is None else chosen[j])
        start, seconds = max(until[g] for g in mine), tables[j].seconds[size]
        found[j] = Granted(tables[j].name, mine, start, seconds)
        for g in mine:
            until[g] = start + seconds
    return tuple(found[j] for j in sorted(found))
