"""Scheduling policies (LRTF, SRTF, round robin, FIFO, complementary, ASHA): the waiting job of least key is next.

A policy may also compare `Score`s, what members reported at their validations, and end jobs for them.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_decentral.shared.plan.arguments import checked

MODES = ("min", "max")


@dataclass(frozen=True)
class Score:
    """One validation of one member."""

    metric: str  # the name under which the value was logged
    mode: str  # whether "min" or "max" is good
    step: int  # optimizer steps so far
    value: float

    @property
    def loss(self) -> float:
        """The smaller, the better; a value that is no number is worst."""
        if math.isnan(self.value):
            return math.inf
        return self.value if self.mode == "min" else -self.value

    def __str__(self) -> str:
        return f"{self.metric} {self.value:.6g}"


Histories = Mapping[str, Sequence[Score]]  # {member: its scores, in the order of their steps}


class Scoreboard:
    """The histories of all members, and who was ended for them."""

    def __init__(self) -> None:
        self.histories: dict[str, list[Score]] = {}
        self.verdicts: dict[str, str] = {}  # by member, why it was ended early

    def add(self, member: str, score: Score) -> None:
        """Add a score. A member that goes on from a checkpoint repeats steps: older scores of them count no more."""
        before = self.histories.get(member, [])
        self.histories[member] = [*(old for old in before if old.step < score.step), score]

    def best(self, member: str) -> Score | None:
        """The best score that the member has reported; None: none yet."""
        return min(self.histories.get(member, []), key=lambda score: score.loss, default=None)


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


Watched = tuple[str | None, str | None]
"""(metric, mode): the name of a logged metric, and whether its "min" or "max" is good; a metric of None: what the first
checkpoint callback that monitors one monitors, and its mode; a mode of None: "min"."""


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
        """min over the waiting of (key, arrived); ValueError if nobody waits."""
        if not waiting:
            raise ValueError("no job waits: ask a policy only while one does")
        return min(waiting, key=lambda job: (self.key(job, waiting, running), job.arrived))

    @property
    def watched(self) -> Watched | None:
        """Score that jobs must report; None: none, and nobody is ended."""
        return None

    def verdict(self, histories: Histories, name: str) -> str | None:
        """Reason why the job of this name, whose last score is new, ends here; None: it goes on."""
        return None


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
    """Job that has waited for the most grants first: equal shares."""

    def key(self, job: Job, waiting: Sequence[Job], running: Sequence[Job]) -> Key:
        return (job.served,)


@dataclass(frozen=True)
class FIFO(Policy):
    """First in, first out: who came first runs whenever it can."""

    def key(self, job: Job, waiting: Sequence[Job], running: Sequence[Job]) -> Key:
        return (job.arrived,)


@dataclass(frozen=True)
class Complementary(Policy):
    """Long pieces with short ones: the next piece that keeps the mean of what runs closest to the mean of all.

        | (sum of the running pieces + next) / (running + 1) - mean over waiting and running |

    Partial-backprop jobs have long pieces at deep steps and short ones at shallow steps; devices then take turns with
    both kinds instead of waiting together for the long ones.
    """

    def key(self, job: Job, waiting: Sequence[Job], running: Sequence[Job]) -> Key:
        together = [other.next_seconds for other in running]
        every = [*together, *(other.next_seconds for other in waiting)]
        return (abs(sum(together, job.next_seconds) / (len(together) + 1) - sum(every) / len(every)),)


@checked
@dataclass(frozen=True)
class ASHA(RoundRobin):
    """Asynchronous successive halving: jobs share the devices equally, and the worst are ended early, by rungs.

        rung k is a job's validation number r_k = min_validations * reduction_factor^k
        a job that comes there as one of n so far goes on if fewer than max(1, floor(n / reduction_factor)) were better

    Nobody waits for the others to come to a rung: the first goes on, and who went on is not asked again before its next
    rung. Of equal scores all go on.

    Source: Li et al. 1810.05934, in the form that ends jobs rather than pausing and promoting them, as in Optuna.

    Args:
        metric, mode: what is compared, see `Watched`.

    Raises:
        ValueError: a value that can't be.
    """

    metric: str | None = None
    mode: str | None = None
    reduction_factor: int = 3
    min_validations: int = 1

    def __post_init__(self) -> None:
        if self.mode not in (None, *MODES):
            raise ValueError(f"ASHA: mode must be min or max, got {self.mode}")
        if self.reduction_factor < 2:
            raise ValueError(f"ASHA: reduction_factor must be at least 2, got {self.reduction_factor}")
        if self.min_validations < 1:
            raise ValueError(f"ASHA: min_validations must be at least 1, got {self.min_validations}")

    @property
    def watched(self) -> Watched:
        return self.metric, self.mode

    def verdict(self, histories: Histories, name: str) -> str | None:
        number, rung = len(histories[name]), self.min_validations
        while rung < number:
            rung *= self.reduction_factor
        if rung != number:
            return None
        score = histories[name][-1]
        others = [history[number - 1] for history in histories.values() if len(history) >= number]
        at = [other for other in others if other.metric == score.metric]
        better = sum(other.loss < score.loss for other in at)
        kept = max(1, len(at) // self.reduction_factor)
        why = f"{score} at validation {number} is number {better + 1} of {len(at)}, {kept} may go on"
        return why if better >= kept else None


POLICIES: Mapping[str, Policy] = {
    "complementary": Complementary(),
    "fifo": FIFO(),
    "lrtf": LRTF(),
    "round_robin": RoundRobin(),
    "srtf": SRTF(),
}
"""Policies for jobs that have no scores, by their names on command lines."""
