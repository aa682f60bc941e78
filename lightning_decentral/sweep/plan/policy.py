"""Scheduling policies (LRTF, SRTF, round robin, FIFO, complementary): the waiting job of the smallest key is next."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Key = tuple[float, ...]


@dataclass(frozen=True)
class Job:
    """A training in progress, as a policy sees it. Its pieces (shards or batches) run one after the other.

    Args:
        name: unique.
        arrived: its place in the order of arrival.
        remaining_seconds: predicted device time of all its pieces that haven't run.
        next_seconds: predicted device time of the piece that would run now.
        served: the number of the grant that it had last, of all grants so far; -1 before its first.
        measured: whether its seconds come from itself; otherwise they are a guess, and policies that go by them let it
            run first, to know.
    """

    name: str
    arrived: int
    remaining_seconds: float
    next_seconds: float
    served: int = -1
    measured: bool = True


class Policy(ABC):
    """An order among waiting jobs; equal keys go by arrival."""

    @abstractmethod
    def key(self, job: Job, waiting: Sequence[Job], running: Sequence[Job]) -> Key:
        """The smaller, the sooner.

        Args:
            waiting: all jobs that could run now, this one included.
            running: the jobs on the other devices at this moment.
        """

    def choose(self, waiting: Sequence[Job], running: Sequence[Job] = ()) -> Job:
        """min over the waiting of (key, arrived).

        Raises:
            ValueError: nobody waits.
        """
        if not waiting:
            raise ValueError("no job waits: ask a policy only while one does")
        return min(waiting, key=lambda job: (self.key(job, waiting, running), job.arrived))


@dataclass(frozen=True)
class LRTF(Policy):
    """Longest remaining time first.

    Exact on unit pieces: makespan = max(max p, ceil(sum p / m)) for jobs of p pieces on m devices.

    Source: Sharded-LRTF, Nagrecha et al. 2110.08633; McNaughton's bound, which it meets.
    """

    def key(self, job: Job, waiting: Sequence[Job], running: Sequence[Job]) -> Key:
        return (job.measured, -job.remaining_seconds)  # False is less: unmeasured ones run first, to be known


@dataclass(frozen=True)
class SRTF(Policy):
    """Shortest remaining time first: the least mean completion time on one device."""

    def key(self, job: Job, waiting: Sequence[Job], running: Sequence[Job]) -> Key:
        return (job.measured, job.remaining_seconds)


@dataclass(frozen=True)
class RoundRobin(Policy):
    """Whoever has waited for the most grants: equal shares."""

    def key(self, job: Job, waiting: Sequence[Job], running: Sequence[Job]) -> Key:
        return (job.served,)


@dataclass(frozen=True)
class FIFO(Policy):
    """In order of arrival: who came first runs whenever it can."""

    def key(self, job: Job, waiting: Sequence[Job], running: Sequence[Job]) -> Key:
        return (job.arrived,)


@dataclass(frozen=True)
class Complementary(Policy):
    """Long pieces beside short ones: the next piece that keeps the mean of what runs closest to the mean of all.

        | (sum of the running pieces + next) / (running + 1) - mean over waiting and running |

    Partial-backprop jobs have long pieces at deep steps and short ones at shallow steps; devices then take turns with
    both kinds instead of waiting together for the long ones.
    """

    def key(self, job: Job, waiting: Sequence[Job], running: Sequence[Job]) -> Key:
        beside = [other.next_seconds for other in running]
        every = [*beside, *(other.next_seconds for other in waiting)]
        return (abs(sum(beside, job.next_seconds) / (len(beside) + 1) - sum(every) / len(every)),)


POLICIES: Mapping[str, Policy] = {
    "complementary": Complementary(),
    "fifo": FIFO(),
    "lrtf": LRTF(),
    "round_robin": RoundRobin(),
    "srtf": SRTF(),
}
"""By the names of command lines."""
