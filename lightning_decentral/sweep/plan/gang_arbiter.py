"""Arbiter of JigSaw: workers of several jobs share devices piece by piece, and are placed by what their pieces take.

A job has a worker for each device. A worker asks for its device before a forward, and returns it after the backward: a
piece. An iteration of a job is a gang of pieces. It is complete, and gets its place in the order, when the job's last
worker has asked. So all devices run gangs in one order, and workers that wait for each other within a piece are never
in each other's way. No worker waits for another for more than `PATIENCE_SECONDS`, for one that is gone not at all: it
then runs without a device, and the job's next collective call finds out.
"""

import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from lightning_decentral.shared.plan.timeline import Span
from lightning_decentral.sweep.plan.arbiter import Arbiter, Instruction, MemberAccount, Orders, Phase, TurnReport
from lightning_decentral.sweep.plan.gangs import PAIRINGS, Gang, Turns, on_emptiest, sentence
from lightning_decentral.sweep.plan.policy import FIFO
from lightning_decentral.sweep.plan.simulation import Ran, Spans

PATIENCE_SECONDS = 10.0  # or three pieces, if those are longer
LEAST, WINDOW = 3, 8  # pieces of a worker: before its job is placed; the latest ones, whose median counts
CHANGED, WORTH = 0.2, 0.03  # of a piece's seconds: plan again; of a cycle: move workers


@dataclass
class Crew:
    """Workers of one job."""

    places: list[int]  # number of each worker's device
    latest: list[deque[float]]  # seconds of each worker's latest pieces
    planned: tuple[float, ...] = ()  # seconds of the pieces when the job was placed; empty: it wasn't
    asking: set[int] = field(default_factory=set)  # workers that wait for the others' requests
    passed: set[int] = field(default_factory=set)  # workers that didn't wait for them
    gone: set[int] = field(default_factory=set)
    since: float = math.inf  # when the first of them asked

    def seconds(self) -> tuple[float, ...]:
        """Return the median seconds of each worker's pieces; empty before all have computed `LEAST`."""
        return tuple(map(median, self.latest)) if min(map(len, self.latest)) >= LEAST else ()

    def changed(self) -> bool:
        """Return whether the pieces take another time than when the job was placed."""
        found = self.seconds()
        pairs = zip(found, self.planned, strict=False)
        return bool(found) and (not self.planned or any(abs(new - old) > CHANGED * old for new, old in pairs))


class GangArbiter(Arbiter):
    """Arbiter that is asked by each worker, `member/rank`, for the device that it chooses.

    Args:
        devices: names, one for each worker of a job.
        given: forecast seconds of a job's pieces in any unit, which place it until they are measured, and for good on
            CUDA devices, where a worker can't move.
        together: members that must have asked before any of them runs; then the clock starts.
    """

    def __init__(
        self,
        devices: Sequence[str],
        given: Mapping[str, Sequence[float]] = {},  # never changed
        together: Sequence[str] = (),
        cores: Mapping[str, Sequence[int]] = {},
    ) -> None:
        super().__init__(FIFO(), devices)
        self.cores, self.opened = cores, math.inf
        self.pieces, self.measured = Counter[str](), dict[str, tuple[float, ...]]()  # of each worker of a job
        self._given, self._absent, self._crews = given, set(together), dict[str, Crew]()
        self._queue: list[tuple[str, int, int]] = []  # (job, worker, device) of pieces whose gang is complete
        self._running: dict[int, tuple[str, int, float]] = {}  # {device: (job, worker, since when)}
        self._stale, self._concluded = False, list[str]()  # the jobs that the last remark was about

    # ---- events -----------------------------------------------------------------------------------------------------

    def join(self, name: str, width: int = 1) -> MemberAccount:
        account, seconds = super().join(name, width), self._given.get(name)
        places = list(range(width))
        if seconds is not None:
            loads = [0.0] * width
            for other, crew in self._crews.items():
                for place, piece in zip(crew.places, crew.seconds() or self._given.get(other, ()), strict=False):
                    loads[place] += piece
            places = inverse(on_emptiest(seconds, loads))
        self._crews[name] = Crew(places, [deque(maxlen=WINDOW) for _ in places])
        if self._pinned:
            account.home = tuple(self.devices[place] for place in places)
        return account

    def request(self, name: str) -> None:
        _, rank, crew = self._worker(name)
        crew.gone.discard(rank)
        crew.passed.discard(rank)
        crew.asking.add(rank)

    def give_back(self, name: str, turn: TurnReport, now: float) -> None:
        job, rank, crew = self._worker(name)
        self._free(job, [rank], now)
        if rank == 0:
            self.members[job].turn = turn
        if turn.piece_seconds is not None:
            self.pieces[job] += rank == 0
            crew.latest[rank].append(turn.piece_seconds)
            self._stale = self._stale or crew.changed()

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
        crew = self._crews.pop(name)
        self.measured[name] = crew.seconds()
        self._free(name, range(len(crew.places)), now)
        self._queue = [piece for piece in self._queue if piece[0] != name]
        self._absent.discard(name)
        self._stale = True
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

    def ran(self) -> Spans:
        """Spans of all pieces of ended jobs on `device 0`, `device 1` and so on, in seconds since the clock started."""
        row = {device: f"device {number}" for number, device in enumerate(self.devices)}
        return {
            Ran(job, number): Span(row[span.worker], span.start - self.opened, span.finish - self.opened)
            for job, member in self.ended.items()
            for number, span in enumerate(member.spans)
        }

    def place(self, name: str) -> str | None:
        job, rank, _ = self._worker(name)
        own = [device for device, piece in self._running.items() if piece[:2] == (job, rank)]
        return self.devices[own[0]] if own else None

    # ---- decisions --------------------------------------------------------------------------------------------------

    def _gather(self, now: float) -> Iterator[tuple[str, Instruction]]:
        """Queue gangs that are complete; let workers run at once whose fellows are gone, or don't ask."""
        for job, crew in self._crews.items():
            crew.since = min(crew.since, now) if crew.asking else math.inf
            if crew.asking and len(crew.asking | crew.passed) == len(crew.places):
                self._queue += [(job, rank, crew.places[rank]) for rank in sorted(crew.asking)]
                self._absent.discard(job)
                crew.asking, crew.passed, crew.since = set(), set(), math.inf
            elif crew.asking and (crew.gone or now >= crew.since + PATIENCE_SECONDS):
                yield from [(f"{job}/{rank}", Instruction.RUN) for rank in sorted(crew.asking)]
                crew.asking, crew.passed, crew.since = set(), crew.passed | crew.asking, math.inf

    def _grant(self, now: float) -> Iterator[tuple[str, Instruction]]:
        """Run queued pieces on free devices, in the queue's order."""
        if self._absent:
            return
        if self.opened == math.inf:  # now all are there: in the order in which they have joined
            self.opened, order = now, list(self.members)
            self._queue.sort(key=lambda piece: order.index(piece[0]))
        for piece in list(self._queue):
            job, rank, device = piece
            if device not in self._running:
                self._queue.remove(piece)
                self._running[device] = job, rank, now
                self.members[job].phase = Phase.RUNNING
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
        for gang in gangs:
            self._crews[gang.name].planned = gang.seconds
        if len(gangs) < 2:
            return
        now = Turns(tuple(gangs), tuple(tuple(inverse(self._crews[gang.name].places)) for gang in gangs), ())
        best = min((pairing.turns(gangs) for pairing in PAIRINGS.values()), key=lambda turns: turns.cycle_seconds)
        moves = not self._pinned and best.cycle_seconds < (1 - WORTH) * now.cycle_seconds
        for gang, pieces in zip(gangs, best.pieces if moves else (), strict=False):
            self._crews[gang.name].places = inverse(pieces)
        verdict = sentence(best if moves else now)
        jobs = [gang.name for gang in gangs]
        if moves or self._concluded != jobs:
            self.remarks.append(verdict)
        self._concluded = jobs

    def _worker(self, name: str) -> tuple[str, int, Crew]:
        job, _, rank = name.partition("/")
        return job, int(rank), self._crews[job]

    def _patience_seconds(self, job: str) -> float:
        return max(PATIENCE_SECONDS, *(3 * max(latest, default=0.0) for latest in self._crews[job].latest))


def inverse(row: Sequence[int]) -> list[int]:
    """Return the inverse permutation: devices by worker from workers by device, and the other way round."""
    return [row.index(number) for number in range(len(row))]
