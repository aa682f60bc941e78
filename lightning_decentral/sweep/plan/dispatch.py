"""Dispatch of many jobs to few devices: decides, event by event, which pieces are loaded and computed where.

It has no clock: `simulation` feeds it events of a virtual time. `arbiter` orders the processes of a real sweep."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf, isfinite

from lightning_decentral.shared.plan.arguments import at_least, checked
from lightning_decentral.sweep.plan.policy import Job, Policy


@checked
@dataclass(frozen=True)
class WorkPiece:
    """Piece of a job, a shard or a batch: `compute_seconds` on a device, after `load_seconds` (bytes / rate)."""

    compute_seconds: float
    load_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("compute_seconds", "load_seconds"):
            value = getattr(self, name)
            if not (isfinite(value) and value >= 0):
                raise ValueError(f"{name} of a piece must be 0 or more, got {value}: give seconds")


@checked
@dataclass(frozen=True)
class Queue:
    """Job as a queue of pieces that run one after the other, on any device."""

    name: str  # unique
    pieces: tuple[WorkPiece, ...]
    arrival_seconds: float = 0.0  # the job can't run before
    memory_bytes: float = 0.0  # needed on a device, together with those of a job that it is loaded next to

    def __post_init__(self) -> None:
        if not self.pieces:
            raise ValueError(f"job {self.name} has no pieces: give it one or more")
        if not (isfinite(self.arrival_seconds) and self.arrival_seconds >= 0):
            raise ValueError(f"job {self.name} arrives at {self.arrival_seconds} s: give arrival_seconds of 0 or more")
        at_least(0, "0 needs none", memory_bytes=self.memory_bytes)


@dataclass(frozen=True)
class Processor:
    """Device that computes one piece at a time and loads one piece at a time, the next one while this one computes."""

    name: str
    memory_bytes: float = inf


def devices(number: int, memory_bytes: float = inf) -> tuple[Processor, ...]:
    if number < 1:
        raise ValueError(f"devices must be at least 1, got {number}: give 1 or more")
    return tuple(Processor(f"device {i}", memory_bytes) for i in range(number))


@dataclass(frozen=True)
class DispatchOrder:
    """Order to load (`load`) or compute piece `piece` of job `job` on device `device` (all numbers from 0)."""

    device: int
    job: int
    piece: int
    load: bool


@dataclass
class _Slot:
    """State of a device: what it computes and what runs next on it, by (job, piece)."""

    computing: tuple[int, int] | None = None
    coming: tuple[int, int] | None = None
    loaded: bool = False


@dataclass
class _Progress:
    """Progress of a job: pieces that have run, its last grant, and whether the job waits."""

    done: int = 0
    served: int = -1
    waits: bool = False


class Dispatch:
    """Records what happened and decides what to do: call `orders` after all events of one moment are recorded.

    A free device takes the policy's choice among the waiting jobs. While a device computes, it also chooses its next
    piece, if that must be loaded: among the waiting jobs and the next piece of the computing job. A loaded piece
    stays on its device. ValueError: no jobs, two with one name, or one that needs more memory than any device has."""

    def __init__(self, queues: Sequence[Queue], devices: Sequence[Processor], policy: Policy) -> None:
        if not queues:
            raise ValueError("there is no job to schedule: give one or more")
        if not devices:
            raise ValueError("there is no device to schedule on: give one or more")
        refuse_one_name_for_two([queue.name for queue in queues])
        most = max(device.memory_bytes for device in devices)
        for queue in queues:
            if queue.memory_bytes > most:
                raise ValueError(
                    f"job {queue.name} needs {queue.memory_bytes:.0f} bytes, but the largest device has {most:.0f}: "
                    "cut it into smaller shards"
                )
        self.queues, self.devices, self.policy = queues, devices, policy
        self._slots = [_Slot() for _ in devices]
        self._progress = [_Progress() for _ in queues]
        self._remaining = [remaining_seconds(queue) for queue in queues]
        places = sorted(range(len(queues)), key=lambda j: queues[j].arrival_seconds)
        self._place = {job: place for place, job in enumerate(places)}
        self._number = {queue.name: job for job, queue in enumerate(queues)}
        self._jobs: dict[tuple[int, int], Job] = {}
        self._loading = any(piece.load_seconds > 0 for queue in queues for piece in queue.pieces)
        self._grants = 0

    # ---- what happened ------------------------------------------------------------------------------------------

    def arrive(self, job: int) -> None:
        """Record that the job has arrived: it may run from now on."""
        self._progress[job].waits = True

    def loaded(self, device: int) -> None:
        """Record that the next piece's load on this device has ended."""
        self._slots[device].loaded = True

    def finished(self, device: int) -> None:
        """Record that the piece which computed on this device has ended."""
        slot = self._slots[device]
        assert slot.computing is not None
        job = slot.computing[0]
        slot.computing = None
        self._progress[job].done += 1
        # The job's next piece may be loaded here already: then no other device takes it.
        own_next = slot.coming is not None and slot.coming[0] == job
        self._progress[job].waits = not own_next and self._progress[job].done < len(self.queues[job].pieces)

    @property
    def over(self) -> bool:
        """True when all pieces of all jobs have run."""
        return all(job.done == len(queue.pieces) for job, queue in zip(self._progress, self.queues, strict=True))

    # ---- what to do ---------------------------------------------------------------------------------------------

    def orders(self) -> Iterator[DispatchOrder]:
        """Yield orders to carry out now: free devices first, then loads ahead."""
        for device, slot in enumerate(self._slots):
            if slot.computing is None and slot.coming is None:
                yield from self._take(device)
            if slot.computing is None and slot.coming is not None and slot.loaded:
                slot.computing, slot.coming, slot.loaded = slot.coming, None, False
                yield DispatchOrder(device, *slot.computing, load=False)
        for device, slot in enumerate(self._slots if self._loading else ()):
            if slot.computing is not None and slot.coming is None:
                yield from self._take(device)

    def _take(self, device: int) -> Iterator[DispatchOrder]:
        """Choose a device's next piece: while it computes, only a piece that must be loaded."""
        slot, ahead = self._slots[device], self._slots[device].computing
        room = self.devices[device].memory_bytes - (self.queues[ahead[0]].memory_bytes if ahead else 0.0)
        # {job: its next piece}: jobs that aren't computed or loaded, and that fit next to the job that computes here;
        # of that job the piece after.
        waiting = enumerate(self._progress)
        pieces = {j: it.done for j, it in waiting if it.waits and self.queues[j].memory_bytes <= room}
        if ahead and ahead[1] + 1 < len(self.queues[ahead[0]].pieces):
            pieces[ahead[0]] = ahead[1] + 1
        if not pieces:
            return
        seen = [self._job(job, piece) for job, piece in pieces.items()]
        running = [self._job(*other.computing) for other in self._slots if other is not slot and other.computing]
        job = self._number[self.policy.choose(seen, running).name]
        to_load = self.queues[job].pieces[pieces[job]].load_seconds > 0
        if ahead and not to_load:  # chosen when the device is free, as late as possible
            return
        slot.coming, slot.loaded = (job, pieces[job]), not to_load
        self._progress[job].waits, self._progress[job].served = False, self._grants
        self._grants += 1
        if to_load:
            yield DispatchOrder(device, job, pieces[job], load=True)

    def _job(self, job: int, piece: int) -> Job:
        """Describe the job for a policy from this piece on; computed anew only after each grant."""
        served = self._progress[job].served
        known = self._jobs.get((job, piece))
        if known is None or known.served != served:
            seconds = self.queues[job].pieces[piece].compute_seconds
            known = Job(self.queues[job].name, self._place[job], self._remaining[job][piece], seconds, served)
            self._jobs[job, piece] = known
        return known


def remaining_seconds(queue: Queue) -> list[float]:
    """[piece]: seconds of computing from this piece on."""
    return list(accumulate(piece.compute_seconds for piece in reversed(queue.pieces)))[::-1]


def refuse_one_name_for_two(names: Sequence[str]) -> None:
    """Raise ValueError if two jobs have the same name."""
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"two jobs are called {twice!r}: give each its own name")
