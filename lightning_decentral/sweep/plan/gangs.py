"""Gang scheduling (JigSaw): jobs of several workers of unequal depth share their devices iteration by iteration.

    cycle = max_g sum_j t_j,d(j,g)        d(j, .) a permutation: which piece of job j device g runs

An iteration of job j is a gang of G pieces, one for each device, with a barrier at its end; a device runs one piece at
a time. In a cycle every job runs one iteration, and every device one piece of each job, in some order. With that period
no barrier ever waits: all of a job's pieces lie within the cycle, whatever the order. So the largest sum on a device is
not only a lower bound of the cycle but the cycle itself, and the order decides when jobs complete.

    complementary pair, depths i/N:   2 F + B (N + 1) / N   against  2 (F + B)
    N jobs on a Latin square:         N F + B (N + 1) / 2   against  N (F + B)

Source: JigSaw, in the sense of Kumar et al. 2111.10672; the formulas are derived here."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from math import ceil, factorial, isfinite

from lightning_decentral.shared.plan.timeline import Span, Task, run
from lightning_decentral.sweep.plan.milp import MILP, NoSolution

MOST_TRIED = 200_000  # maximum number of pieces in all orders of the jobs that are tried


@dataclass(frozen=True)
class Gang:
    """Job whose iteration has one piece for each device."""

    name: str
    seconds: tuple[float, ...]  # of the pieces, one for each device
    iterations: int = 1  # of the whole job

    def __post_init__(self) -> None:
        if not self.seconds or not all(isfinite(s) and s >= 0 for s in self.seconds):
            raise ValueError(f"job {self.name} must have pieces of 0 or more seconds, got {self.seconds}")
        if self.iterations < 1:
            raise ValueError(f"job {self.name} must have 1 or more iterations, got {self.iterations}")


def of_depths(name: str, forward: float, backward: float, depths: Sequence[float], iterations: int = 1) -> Gang:
    """Make a job with pieces of forward + backward * depth seconds: depth is the trained fraction of the model.
    ValueError: a depth outside of 0..1."""
    wrong = [depth for depth in depths if not 0 <= depth <= 1]
    if wrong:
        raise ValueError(f"job {name} must have depths from 0 to 1, shares of the model, got {wrong[0]:g}")
    return Gang(name, tuple(forward + backward * depth for depth in depths), iterations)


def staircase(name: str, forward: float, backward: float, size: int, iterations: int = 1) -> Gang:
    """Make a job with depths i / size, i = 1..size: those of `partial.depth.Staircase`."""
    return of_depths(name, forward, backward, [(i + 1) / size for i in range(size)], iterations)


@dataclass(frozen=True)
class Turns:
    """Assignment of pieces to devices, and the order in which devices run the jobs."""

    gangs: tuple[Gang, ...]
    pieces: tuple[tuple[int, ...], ...]  # pieces[j][g] is the number of the piece of job j on device g
    order: tuple[int, ...]  # of the jobs, the same on every device

    def seconds(self, job: int, device: int) -> float:
        return self.gangs[job].seconds[self.pieces[job][device]]

    @property
    def devices(self) -> int:
        return len(self.pieces[0])

    @property
    def cycle_seconds(self) -> float:
        """Seconds of a cycle: the largest sum on a device."""
        jobs = range(len(self.gangs))
        return max(sum(self.seconds(j, g) for j in jobs) for g in range(self.devices))

    @property
    def unaware_seconds(self) -> float:
        """Seconds of a cycle of gangs one after the other, each as long as its longest piece."""
        return sum(max(gang.seconds) for gang in self.gangs)

    def spans(self) -> dict[tuple[str, int, int], Span]:
        """Spans of all iterations by (job, iteration, device); later cycles skip jobs that have ended."""
        tasks = []
        for iteration in range(max(gang.iterations for gang in self.gangs)):
            for j in self.order:
                name = self.gangs[j].name
                if iteration < self.gangs[j].iterations:
                    barrier = [(name, iteration - 1, g) for g in range(self.devices)] if iteration else []
                    for g in range(self.devices):
                        task = Task((name, iteration, g), f"device {g}", self.seconds(j, g), tuple(barrier))
                        tasks.append(task)
        return run(tasks)

    def completion_seconds(self) -> dict[str, float]:
        """Completion time of each job, in seconds: when its last iteration ends."""
        ends = [(name, span.finish) for (name, _, _), span in self.spans().items()]
        return {gang.name: max(end for name, end in ends if name == gang.name) for gang in self.gangs}

    def mean_completion_seconds(self) -> float:
        found = self.completion_seconds()
        return sum(found.values()) / len(found)


def ordered(turns: Turns) -> Turns:
    """Sort jobs for the least mean completion time: a few jobs of few iterations try all orders, otherwise the shortest
    run first."""
    jobs = range(len(turns.gangs))
    if factorial(len(jobs)) * turns.devices * sum(gang.iterations for gang in turns.gangs) > MOST_TRIED:
        work = [gang.iterations * sum(gang.seconds) for gang in turns.gangs]
        return replace(turns, order=tuple(sorted(jobs, key=lambda j: (work[j], j))))
    # One order for all devices suffices for jobs of one iteration: exchanging two neighbours so that all devices agree
    # never delays a job's end (concurrent open shop).
    orders = (replace(turns, order=order) for order in permutations(jobs))
    return min(orders, key=lambda found: (found.mean_completion_seconds(), found.order))


def lower_bound_seconds(gangs: Sequence[Gang]) -> float:
    """Lower bound of a cycle under any assignment: max( longest piece, sum of all pieces / G )."""
    every = [seconds for gang in gangs for seconds in gang.seconds]
    return max(*every, sum(every) / len(gangs[0].seconds))


class Pairing(ABC):
    """Policy that assigns every job's pieces to devices."""

    def turns(self, gangs: Sequence[Gang]) -> Turns:
        """Assign the pieces, jobs in the given order; ValueError for no job, or jobs with unequal numbers of pieces."""
        sizes = {gang.name: len(gang.seconds) for gang in gangs}
        if not gangs or len(sizes) < len(gangs):
            raise ValueError(f"jobs must be one or more of different names, got {[gang.name for gang in gangs]}")
        if len(set(sizes.values())) > 1:
            raise ValueError(f"jobs must have equally many pieces, one for each device, got {sizes}")
        return Turns(tuple(gangs), tuple(map(tuple, self.pieces(gangs))), tuple(range(len(gangs))))

    @abstractmethod
    def pieces(self, gangs: Sequence[Gang]) -> list[list[int]]:
        """[job][device]: number of its piece."""


@dataclass(frozen=True)
class Unaware(Pairing):
    """Assign pieces by rank, d(j, g) = g: all deep workers share one device."""

    def pieces(self, gangs: Sequence[Gang]) -> list[list[int]]:
        return [list(range(len(gang.seconds))) for gang in gangs]


@dataclass(frozen=True)
class ComplementaryPairing(Pairing):
    """Pair jobs of like spread: one's longest piece runs with the other's shortest. Exact for two jobs."""

    def pieces(self, gangs: Sequence[Gang]) -> list[list[int]]:
        like = sorted(range(len(gangs)), key=lambda j: max(gangs[j].seconds) - min(gangs[j].seconds), reverse=True)
        place = {job: at for at, job in enumerate(like)}
        return [_ascending(gang)[:: -1 if place[j] % 2 else 1] for j, gang in enumerate(gangs)]


@dataclass(frozen=True)
class LatinSquare(Pairing):
    """Assign d(j, g) = (j + g) mod G, pieces by length: equal sums for G equal jobs, and for any multiple of G."""

    def pieces(self, gangs: Sequence[Gang]) -> list[list[int]]:
        rows = [_ascending(gang) for gang in gangs]
        return [[row[(j + g) % len(row)] for g in range(len(row))] for j, row in enumerate(rows)]


@dataclass(frozen=True)
class GreedyGangs(Pairing):
    """Assign greedily, jobs of the largest spread first: the longest piece to the device with the least so far."""

    def pieces(self, gangs: Sequence[Gang]) -> list[list[int]]:
        loads = [0.0] * len(gangs[0].seconds)
        found: list[list[int]] = [[] for _ in gangs]
        for j in sorted(range(len(gangs)), key=lambda j: min(gangs[j].seconds) - max(gangs[j].seconds)):
            found[j] = on_emptiest(gangs[j].seconds, loads)
            loads = [load + gangs[j].seconds[d] for load, d in zip(loads, found[j], strict=True)]
        return found


@dataclass(frozen=True)
class ExactGangs(Pairing):
    """Assign by a mixed-integer program, min T:

        sum_d x_jdg = 1,  sum_g x_jdg = 1,  sum_jd t_jd x_jdg <= T,  x_jdg in {0, 1}

    Needs scipy (extra `schedule`). If the time runs out, the better of its result and `GreedyGangs`."""

    limit_seconds: float = 10.0

    def pieces(self, gangs: Sequence[Gang]) -> list[list[int]]:
        greedy, size = GreedyGangs().turns(gangs), len(gangs[0].seconds)
        kept = [list(row) for row in greedy.pieces]
        if greedy.cycle_seconds <= lower_bound_seconds(gangs):
            return kept
        program, jobs = MILP(), range(len(gangs))
        cycle = program.variable(cost=1.0)
        x = {(j, d, g): program.binary() for j in jobs for d in range(size) for g in range(size)}
        for j in jobs:
            for one in range(size):
                program.equal({x[j, one, g]: 1.0 for g in range(size)}, 1.0)
                program.equal({x[j, d, one]: 1.0 for d in range(size)}, 1.0)
        for g in range(size):
            program.equal({x[0, g, g]: 1.0}, 1.0)  # devices are alike: the first job's pieces may stay where they are
            terms = {x[j, d, g]: gang.seconds[d] for j, gang in enumerate(gangs) for d in range(size)}
            program.at_most({**terms, cycle: -1.0}, 0.0)
        try:
            value, _ = program.solve(self.limit_seconds)
        except NoSolution:
            return kept
        rows = [[max(range(size), key=lambda d: value[x[j, d, g]]) for g in range(size)] for j in jobs]
        found = replace(greedy, pieces=tuple(map(tuple, rows)))
        return rows if found.cycle_seconds < greedy.cycle_seconds else kept


def _ascending(gang: Gang) -> list[int]:
    return sorted(range(len(gang.seconds)), key=lambda d: gang.seconds[d])


def on_emptiest(seconds: Sequence[float], loads: Sequence[float]) -> list[int]:
    """Return the number of the piece on each device: the longest one where the load is least, and so on."""
    emptiest = sorted(range(len(loads)), key=lambda g: loads[g])
    longest = sorted(range(len(seconds)), key=lambda d: -seconds[d])
    there = dict(zip(emptiest, longest, strict=True))
    return [there[g] for g in range(len(loads))]


PAIRINGS: dict[str, Pairing] = {
    "rank r on device r": Unaware(),
    "complementary": ComplementaryPairing(),
    "latin square": LatinSquare(),
    "greedy": GreedyGangs(),
}


def sentence(turns: Turns) -> str:
    """Compare a cycle with one job after the other, in one line; within 3 % of each other seconds are equal."""
    jobs, cycle, unaware = ", ".join(gang.name for gang in turns.gangs), turns.cycle_seconds, turns.unaware_seconds
    if cycle > 0.97 * unaware:
        return f"JigSaw gains nothing for {jobs}: a cycle takes {cycle:.3g} s, one job after the other {unaware:.3g} s"
    return f"JigSaw: an iteration of each of {jobs} takes {cycle:.3g} s, one job after the other {unaware:.3g} s"


def stays(jobs: Sequence[tuple[Gang, float]], pairings: Sequence[Pairing]) -> dict[str, Span]:
    """Return each job's stay, from its arrival (in seconds) to the end of its last iteration; the best of the pairings
    places all jobs anew whenever one comes or ends."""
    waiting, left, now = sorted(jobs, key=lambda job: job[1]), dict[Gang, int](), 0.0
    found: dict[str, Span] = {}
    while waiting or left:
        now = now if left else max(now, waiting[0][1])
        while waiting and waiting[0][1] <= now:
            gang, arrival = waiting.pop(0)
            left[gang], found[gang.name] = gang.iterations, Span(gang.name, arrival, arrival)
        cycle = min(pairing.turns([*left]).cycle_seconds for pairing in pairings)
        # Whole cycles, until a job ends or the next one comes.
        cycles = min([*left.values(), *(ceil((arrival - now) / cycle) for _, arrival in waiting[:1] if cycle)])
        now += cycles * cycle
        found |= {gang.name: replace(found[gang.name], finish=now) for gang in left}
        left = {gang: rest - cycles for gang, rest in left.items() if rest > cycles}
    return found
