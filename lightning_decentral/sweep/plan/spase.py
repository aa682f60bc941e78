"""SPASE (select parallelism, allocate, schedule): how many devices each job gets, which, and when.

    min max_j (s_j + sum_k t_jk x_jk)      x_jk: job j runs on k devices, for t_jk seconds, without a break

Two jobs that share a device run one after the other. Each job's table {devices: seconds} comes from short trials of the
best way to run it on that many devices; other numbers of devices aren't considered.

Source: select parallelism, allocate, schedule: Saturn, Nagrecha and Kumar 2309.01226.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import isfinite

from lightning_decentral.shared.plan.arguments import checked
from lightning_decentral.shared.plan.timeline import Span
from lightning_decentral.sweep.plan.milp import MILP, NoSolution

TOLERANCE = 1e-4  # of a gap: the solver is off by 1e-6 of M in each of the rows that add up to a makespan


@checked
@dataclass(frozen=True)
class Table:
    """Table of a job: {number of devices: seconds of the whole job}."""

    name: str
    seconds: Mapping[int, float]

    def __post_init__(self) -> None:
        wrong = {k: s for k, s in self.seconds.items() if k < 1 or not (isfinite(s) and s > 0)}
        if not self.seconds or wrong:
            raise ValueError(f"job {self.name} must map 1 or more devices to seconds above 0, got {dict(self.seconds)}")

    def within(self, devices: int) -> "Table":
        """Drop entries that need more devices; ValueError if nothing is left."""
        found = {k: s for k, s in self.seconds.items() if k <= devices}
        if not found:
            raise ValueError(f"job {self.name} needs {min(self.seconds)} devices, but there are {devices}")
        return Table(self.name, found)


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

    @property
    def gap(self) -> float:
        """(makespan - proven bound) / makespan; 0 where no plan is shorter, up to the solver's tolerance."""
        gap = (self.makespan_seconds - self.bound_seconds) / self.makespan_seconds
        return gap if gap > TOLERANCE else 0.0

    @property
    def makespan_seconds(self) -> float:
        return max(job.start + job.seconds for job in self.granted)

    def spans(self) -> dict[tuple[str, int], Span]:
        return {
            (job.name, device): Span(f"device {device}", job.start, job.start + job.seconds)
            for job in self.granted
            for device in job.devices
        }


def lower_bound_seconds(tables: Sequence[Table], devices: int) -> float:
    """Lower bound of the makespan: max( max_j min_k t_jk, sum_j min_k k t_jk / m )."""
    longest = max(min(table.seconds.values()) for table in tables)
    return max(longest, sum(min(k * s for k, s in table.seconds.items()) for table in tables) / devices)


def _fitting(tables: Sequence[Table], devices: int) -> list[Table]:
    """Drop table entries that need more devices. ValueError: no jobs, two with one name, or one that doesn't fit."""
    names = [table.name for table in tables]
    if not tables or len(set(names)) < len(names):
        raise ValueError(f"jobs must be one or more of different names, got {names}")
    return [table.within(devices) for table in tables]


@dataclass(frozen=True)
class GreedySpase:
    """Greedy scheduler: for every threshold T of the tables, each job gets the fewest device-seconds with time at most
    T. The longest job is placed first, on the devices that are free first. The best T is used.

    Source: the thresholds of Turek, Wolf and Yu 1992.
    """

    def plan(self, tables: Sequence[Table], devices: int) -> SpasePlan:
        """Plan the jobs on equal devices; ValueError for no jobs, two with one name, or one that needs more devices
        than exist.
        """
        tables = _fitting(tables, devices)
        shortest = max(min(table.seconds.values()) for table in tables)
        plans = []
        for most in sorted({s for table in tables for s in table.seconds.values() if s >= shortest}):
            fits = [[k for k, s in table.seconds.items() if s <= most] for table in tables]
            sizes = [min(ks, key=lambda k: (k * t.seconds[k], k)) for t, ks in zip(tables, fits, strict=True)]
            longest = sorted(range(len(tables)), key=lambda j: -tables[j].seconds[sizes[j]])
            granted = _placed(tables, devices, {j: sizes[j] for j in longest})
            plans.append(SpasePlan(granted, lower_bound_seconds(tables, devices), "greedy"))
        return min(plans, key=lambda plan: plan.makespan_seconds)


@dataclass(frozen=True)
class ExactSpase:
    """Exact scheduler for few jobs by a mixed-integer program; `gap` bounds its distance from the optimum.

    Needs scipy (extra `schedule`). Returns the better of it and `GreedySpase`, with the gap left at the time limit.
    """

    limit_seconds: float = 10.0

    def plan(self, tables: Sequence[Table], devices: int) -> SpasePlan:
        """Plan the jobs on equal devices, with the errors of `GreedySpase.plan`."""
        tables = _fitting(tables, devices)
        greedy = GreedySpase().plan(tables, devices)
        if greedy.gap == 0:
            return greedy
        try:
            granted, bound = self._solved(tables, devices, greedy.makespan_seconds)
        except NoSolution:
            return greedy
        bound = max(bound, lower_bound_seconds(tables, devices))
        plans = SpasePlan(granted, bound, "milp"), SpasePlan(greedy.granted, bound, "greedy")
        return min(plans, key=lambda plan: plan.makespan_seconds)

    def _solved(self, tables: Sequence[Table], devices: int, most: float) -> tuple[tuple[Granted, ...], float]:
        """(grants, bound) of the program, with C, s_j, x_jk, a_jg (job j has device g), o_ij (i runs before j), M the
        greedy makespan `most`:

        sum_k x_jk = 1                     sum_g a_jg = sum_k k x_jk               sum_jk k t_jk x_jk <= m C
        s_j + d_j <= C                     d_j = sum_k t_jk x_jk
        s_i + d_i <= s_j + M (3 - o_ij - a_ig - a_jg)
        s_j + d_j <= s_i + M (2 + o_ij - a_ig - a_jg)
        """
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
        p.at_most({**area, end: -float(devices)}, 0.0)
        for i, j in combinations(range(len(tables)), 2):
            before = p.binary()
            for both in zip(has[i], has[j], strict=True):
                shared = dict.fromkeys(both, most)
                p.at_most({start[i]: 1.0, **lasts[i], start[j]: -1.0, before: most, **shared}, 3 * most)
                p.at_most({start[j]: 1.0, **lasts[j], start[i]: -1.0, before: -most, **shared}, 2 * most)
        # Devices are equal: the first job gets the first ones. Without this row HiGHS 1.12 calls some worse plans
        # optimal.
        for one, other in pairwise(has[0]):
            p.at_most({other: 1.0, one: -1.0}, 0.0)
        value, bound = p.solve(self.limit_seconds)  # exact to its tolerance only: devices and their order count
        has_devices = [[g for g, x in enumerate(row) if value[x] > 0.5] for row in has]
        order = sorted(range(len(tables)), key=lambda j: value[start[j]])
        sizes = {j: len(has_devices[j]) for j in order}
        return _placed(tables, devices, sizes, has_devices), bound


def _placed(
    tables: Sequence[Table], devices: int, sizes: Mapping[int, int], chosen: Sequence[Sequence[int]] | None = None
) -> tuple[Granted, ...]:
    """Place jobs one after the other, each as early as its devices are free. `sizes` is {job: number of devices} in
    that order; `chosen` has each job's devices, or is None for those that are free first."""
    free = [0.0] * devices
    found = {}
    for j, size in sizes.items():
        earliest = sorted(range(devices), key=lambda g: free[g])[:size]
        mine = tuple(sorted(earliest) if chosen is None else chosen[j])
        start, seconds = max(free[g] for g in mine), tables[j].seconds[size]
        found[j] = Granted(tables[j].name, mine, start, seconds)
        for g in mine:
            free[g] = start + seconds
    return tuple(found[j] for j in sorted(found))
