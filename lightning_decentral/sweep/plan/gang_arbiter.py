"""Arbiter of JigSaw: workers of several jobs share devices piece by piece, and are placed by what their pieces take.

A job has a worker for each device, which asks for its device before a forward and returns it after the backward: a
piece. The pieces of an iteration are a gang, which is complete, and gets its place in the order, when the job's last
worker has asked. So all devices run gangs in one order, and workers that wait for each other within a piece never wait
for another job that waits for them. No worker waits for another one of its job for more than `PATIENCE_SECONDS`, for
one that is gone not at all: it runs without a device, and the job's next collective call finds out."""

import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from types import MappingProxyType

from lightning_decentral.shared.plan.timeline import Span
from lightning_decentral.sweep.plan.arbiter import Arbiter, Instruction, MemberAccount, Orders, Phase, TurnReport
from lightning_decentral.sweep.plan.gangs import PAIRINGS, Gang, Turns, on_emptiest, sentence
from lightning_decentral.sweep.plan.policy import FIFO
from lightning_decentral.sweep.plan.simulation import Ran, Spans

PATIENCE_SECONDS = 10.0  # or three pieces, if those are longer
LEAST, WINDOW = 3, 8  # pieces of each worker: before its job is placed; the latest ones, whose median counts
WORTH = 0.03  # of a cycle: a smaller gain moves no worker
EMPTY: Mapping[str, Sequence[float]] = MappingProxyType({})


@dataclass
class Crew:
    """Workers of one job."""

    places: list[int]  # number of each worker's device
    latest: list[deque[float]]  # seconds of each worker's latest pieces
    asking: set[int] = field(default_factory=set)  # workers that wait for the others' requests
    passed: set[int] = field(default_factory=set)  # workers that didn't wait for them
    gone: set[int] = field(default_factory=set)
    since: float = math.inf  # when the first of them asked

    def seconds(self) -> tuple[float, ...]:
        """Return the median seconds of each worker's pieces; empty before all have computed `LEAST`."""
        return tuple(map(median, self.latest)) if min(map(len, self.latest)) >= LEAST else ()


class GangArbiter(Arbiter):
    """Arbiter that each worker, `member/rank`, asks for the device that it chooses; all `together` begin at once.

    `given` are forecast seconds of a job's pieces, which place it until they are measured, on CUDA devices for good."""

    def __init__(
        self,
        devices: Sequence[str],  # one for each worker of a job
        given: Mapping[str, Sequence[float]] = EMPTY,
        together: Sequence[str] = (),
        cores: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        super().__init__(FIFO(), devices)
        self.cores, self.opened = dict(cores), math.inf  # when the clock started
        self.pieces, self.measured = Counter[str](), dict[str, tuple[float, ...]]()  # of each worker of a job
        self._given, self._absent, self._crews = given, set(together), dict[str, Crew]()
        self._queue: list[tuple[str, int, int]] = []  # (job, worker, device) of pieces whose gang is complete
        self._running: dict[int, tuple[str, int, float]] = {}  # {device: (job, worker, since when)}
        self._stale, self._concluded = False, ""

    def join(self, name: str, width: int = 1) -> MemberAccount:
        account, loads = super().join(name, width), [0.0] * width
        for other, crew in self._crews.items():
            for place, seconds in zip(crew.places, crew.seconds() or self._given.get(other, ()), strict=False):
                loads[place] += seconds
        given = self._given.get(name)
        places = list(range(width)) if given is None else inverse(on_emptiest(given, loads))
        self._crews[name] = Crew(places, [deque(maxlen=WINDOW) for _ in places])
        account.home = tuple(self.devices[place] for place in places) if self._pinned else ()
        return account

    def request(self, name: str) -> None:
        _, rank, crew = self._worker(name)
        crew.asking.add(rank)
        for others in (crew.gone, crew.passed):
            others.discard(rank)

    def give_back(self, name: str, turn: TurnReport, now: float) -> None:
        job, rank, crew = self._worker(name)
        self._free(job, [rank], now)
        if turn.piece_seconds is not None:
            crew.latest[rank].append(turn.piece_seconds)
        if rank == 0:
            self.members[job].turn, self._stale = turn, True
            self.pieces[job] += turn.piece_seconds is not None

    def left(self, name: str) -> None:
        job, rank, crew = self._worker(name)
        self._queue = [piece for piece in self._queue if piece[:2] != (job, rank)]
        crew.asking.discard(rank)
        crew.gone.add(rank)

    def gone(self, name: str, now: float) -> None:
        job, _, crew = self._worker(name)
        # The job's other workers may wait for this one in vain, with a device or for one: they keep nobody waiting.
        self._free(job, range(len(crew.places)), now)
        crew.asking |= {rank for other, rank, _ in self._queue if other == job}
        self._queue = [piece for piece in self._queue if piece[0] != job]
        self.left(name)

    def leave(self, name: str, now: float) -> None:
        self.gone(f"{name}/0", now)
        self.measured[name], self._stale = self._crews.pop(name).seconds(), True
        self._absent.discard(name)
        super().leave(name, now)

    def settle(self, now: float) -> Orders:
        if self._stale:
            self._plan()
        for job, rank, since in list(self._running.values()):
            if now >= since + self._patience_seconds(job):
                self._free(job, [rank], now)  # it hangs, or is a long evaluation
        return [*self._gather(now), *self._grant(now)]

    def rests_seconds(self, now: float) -> float:
        waits = [crew.since + PATIENCE_SECONDS for crew in self._crews.values() if crew.asking]
        runs = [since + self._patience_seconds(job) for job, _, since in self._running.values()]
        return max(0.0, min([*waits, *runs], default=math.inf) - now)

    def seats(self, name: str) -> list[str]:
        return [f"{name}/{rank}" for rank in range(self.members[name].width)]

    def place(self, name: str) -> str | None:
        return next((self.devices[d] for d, (job, rank, _) in self._running.items() if f"{job}/{rank}" == name), None)

    def ran(self) -> Spans:
        """Spans of all pieces of ended jobs on `device 0`, `device 1` and so on, in seconds since the clock started."""
        return {
            Ran(job, number): Span(
                f"device {self.devices.index(at.worker)}", at.start - self.opened, at.finish - self.opened
            )
            for job, member in self.ended.items()
            for number, at in enumerate(member.spans)
        }

    def _gather(self, now: float) -> Iterator[tuple[str, Instruction]]:
        """Queue gangs that are complete; let workers run at once whose fellows are gone, or don't ask."""
        for job, crew in self._crews.items():
            crew.since = min(crew.since, now) if crew.asking else math.inf
            asking = sorted(crew.asking)
            if asking and len(crew.asking | crew.passed) == len(crew.places):
                self._queue += [(job, rank, crew.places[rank]) for rank in asking]
                self._absent.discard(job)
                crew.asking, crew.passed, crew.since = set(), set(), math.inf
            elif asking and (crew.gone or now >= crew.since + PATIENCE_SECONDS):
                yield from [(f"{job}/{rank}", Instruction.RUN) for rank in asking]
                crew.asking, crew.passed, crew.since = set(), crew.passed | crew.asking, math.inf

    def _grant(self, now: float) -> Iterator[tuple[str, Instruction]]:
        """Run queued pieces on free devices, in the queue's order."""
        if self._absent:
            return
        if self.opened == math.inf:  # all are there: in the order in which they have joined
            self.opened, order = now, list(self.members)
            self._queue.sort(key=lambda piece: order.index(piece[0]))
        for piece in list(self._queue):
            job, rank, device = piece
            if device not in self._running:
                self._queue.remove(piece)
                self._running[device], self.members[job].phase = (job, rank, now), Phase.RUNNING
                yield f"{job}/{rank}", Instruction.RUN

    def _free(self, job: str, ranks: Sequence[int], now: float) -> None:
        """Free the devices of these workers of a job."""
        account = self.members[job]
        for device, (other, rank, since) in list(self._running.items()):
            if other == job and rank in ranks:
                del self._running[device]
                account.spans.append(Span(self.devices[device], since, now))
                account.busy_seconds += now - since
        if all(other != job for other, _, _ in self._running.values()):
            account.phase = Phase.WAITING

    def _plan(self) -> None:
        """Place the workers of all measured jobs anew, if that makes the cycle shorter."""
        self._stale = False
        gangs = [Gang(job, seconds) for job, crew in self._crews.items() if (seconds := crew.seconds())]
        if len(gangs) < 2:
            return
        plan = Turns(tuple(gangs), tuple(tuple(inverse(self._crews[gang.name].places)) for gang in gangs), ())
        best = min((pairing.turns(gangs) for pairing in PAIRINGS.values()), key=lambda turns: turns.cycle_seconds)
        if not self._pinned and best.cycle_seconds < (1 - WORTH) * plan.cycle_seconds:
            plan = best
            for gang, pieces in zip(gangs, best.pieces, strict=True):
                self._crews[gang.name].places = inverse(pieces)
        verdict, _, cycle = sentence(plan).partition(" takes ")
        if verdict != self._concluded:
            self._concluded = verdict
            self.remarks.append(f"{verdict} takes {cycle}")

    def _worker(self, name: str) -> tuple[str, int, Crew]:
        job, _, rank = name.partition("/")
        return job, int(rank), self._crews[job]

    def _patience_seconds(self, job: str) -> float:
        return max(PATIENCE_SECONDS, *(3 * max(latest, default=0.0) for latest in self._crews[job].latest))


def inverse(row: Sequence[int]) -> list[int]:
    """Return the inverse permutation: devices by worker from workers by device, and the other way round."""
    return [row.index(number) for number in range(len(row))]
