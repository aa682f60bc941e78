"""Scheduling policies (LRTF, SRTF, round robin, FIFO, complementary, ASHA): the waiting job of least key runs next.

A policy may also compare `Score`s, which members report at their validations, and end jobs early."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_decentral.shared.plan.arguments import checked

MODES = ("min", "max")


@dataclass(frozen=True)
class Score:
    """Score of a member at one validation."""

    metric: str  # the name under which the value was logged
    mode: str  # whether "min" or "max" is good
    step: int  # optimizer steps so far
    value: float

    @property
    def loss(self) -> float:
        """Score as a loss: smaller is better; NaN is worst."""
        if math.isnan(self.value):
            return math.inf
        return self.value if self.mode == "min" else -self.value

    def __str__(self) -> str:
        return f"{self.metric} {self.value:.6g}"


Histories = Mapping[str, Sequence[Score]]  # {member: its scores, in the order of their steps}


class Scoreboard:
    """Score histories of all members, and which members were ended early."""

    def __init__(self) -> None:
        self.histories: dict[str, list[Score]] = {}
        self.verdicts: dict[str, str] = {}  # {member: why it was ended early}

    def add(self, member: str, score: Score) -> None:
        """Add a score. A member that resumes from a checkpoint repeats steps: older scores of these are dropped."""
        before = self.histories.get(member, [])
        self.histories[member] = [*(old for old in before if old.step < score.step), score]

    def best(self, member: str) -> Score | None:
        """Best score that the member has reported; None: no score yet."""
        return min(self.histories.get(member, []), key=lambda score: score.loss, default=None)


Key = tuple[float, ...]


@dataclass(frozen=True)
class Job:
    """Training in progress, as a policy sees it. Its pieces (shards or batches) run one after the other.

    Args:
        name: unique.
        arrived: its place in the order of arrival.
        remaining_seconds: predicted device time of all its remaining pieces.
        next_seconds: predicted device time of its next piece.
        served: number of its latest grant, among all grants; -1 before its first.
        measured: whether its seconds were measured; otherwise they are a guess, and policies that use seconds run the
            job first, to measure it.
    """

    name: str
    arrived: int
    remaining_seconds: float
    next_seconds: float
    served: int = -1
    measured: bool = True


Watched = tuple[str | None, str | None]
"""(metric, mode): the name of a logged metric, and whether its "min" or "max" is good. Metric None: the metric and mode
of the first checkpoint callback that monitors one; mode None: "min"."""


class Policy(ABC):
    """Policy that orders waiting jobs; equal keys go by arrival."""

    @abstractmethod
    def key(self, job: Job, waiting: Sequence[Job], running: Sequence[Job]) -> Key:
        """Sort key of a waiting job: the smallest key runs first.

        Args:
            waiting: all jobs that could run now, including this one.
            running: the jobs on the other devices at this moment.
        """

    def choose(self, waiting: Sequence[Job], running: Sequence[Job] = ()) -> Job:
        """Choose the waiting job with the least (key, arrived); ValueError if no job waits."""
        if not waiting:
            raise ValueError("no job waits: ask a policy only while one does")
        return min(waiting, key=lambda job: (self.key(job, waiting, running), job.arrived))

    @property
    def watched(self) -> Watched | None:
        """Metric and mode of the scores that jobs must report; None: no scores, and no job is ended early."""
        return None

    def verdict(self, histories: Histories, name: str) -> str | None:
        """Reason to end this job early, given its newest score; None: it continues."""
        return None


@dataclass(frozen=True)
class LRTF(Policy):
    """Longest remaining time first.

    Exact on unit pieces: makespan = max(max p, ceil(sum p / m)) for jobs of p pieces on m devices.

    Source: Sharded-LRTF, Nagrecha et al. 2110.08633; McNaughton's bound, which it meets."""

    def key(self, job: Job, waiting: Sequence[Job], running: Sequence[Job]) -> Key:
        return (job.measured, -job.remaining_seconds)  # False is less: unmeasured jobs run first, to be measured


@dataclass(frozen=True)
class SRTF(Policy):
    """Shortest remaining time first: the least mean completion time on one device."""

    def key(self, job: Job, waiting: Sequence[Job], running: Sequence[Job]) -> Key:
        return (job.measured, job.remaining_seconds)


@dataclass(frozen=True)
class RoundRobin(Policy):
    """Round robin, equal shares: the job that has waited for the most grants runs first."""

    def key(self, job: Job, waiting: Sequence[Job], running: Sequence[Job]) -> Key:
        return (job.served,)


@dataclass(frozen=True)
class FIFO(Policy):
    """First in, first out: the earliest job runs whenever it can."""

    def key(self, job: Job, waiting: Sequence[Job], running: Sequence[Job]) -> Key:
        return (job.arrived,)


@dataclass(frozen=True)
class Complementary(Policy):
    """Run long pieces with short ones: the next piece keeps the running mean closest to the mean of all.

        | (sum of the running pieces + next) / (running + 1) - mean over waiting and running |

    Partial-backprop jobs have long pieces at deep steps and short ones at shallow steps; devices then take turns with
    both kinds instead of waiting together for the long ones."""

    def key(self, job: Job, waiting: Sequence[Job], running: Sequence[Job]) -> Key:
        together = [other.next_seconds for other in running]
        every = [*together, *(other.next_seconds for other in waiting)]
        return (abs(sum(together, job.next_seconds) / (len(together) + 1) - sum(every) / len(every)),)


@checked
@dataclass(frozen=True)
class ASHA(RoundRobin):
    """Asynchronous successive halving: jobs share devices equally, and the worst are ended early at rungs.

        rung k is a job's validation number r_k = min_validations * reduction_factor^k
        a job that is one of n at a rung so far goes on if fewer than max(1, floor(n / reduction_factor)) were better

    No job waits for others to reach a rung: the first one continues, and a job that continued is next judged at its
    next rung. Of equal scores all continue.

    Source: Li et al. 1810.05934, in the form that ends jobs rather than pausing and promoting them, as in Optuna.

    Args:
        metric, mode: the compared score, see `Watched`.

    Raises:
        ValueError: an impossible value.
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
"""Policies for jobs without scores, by their names on command lines."""
