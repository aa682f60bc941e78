"""The answer of a rehearsal: steps to the target times the forecast seconds of a step, and what to train with."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from lightning_decentral.planner.candidates import BASELINE, Candidate, in_full
from lightning_decentral.planner.compare import THRESHOLD, chosen

FORECAST_ERROR = 0.07
"""The furthest that forecast seconds of a step were from measured ones (docs/measured.md)."""


@dataclass(frozen=True)
class Reached:
    """A method on so many workers.

    Args:
        rate: what learning rates were multiplied by.
        seeds: steps to the target, of each seed; None: not reached.
        loss: on held-out batches in the end, mean of the seeds.
        step_seconds: forecast; None without a profile.
        step_bytes: sent by all workers in a step.
        curve: (step, loss) of the first seed.
    """

    title: str
    words: str
    workers: int
    rate: float
    seeds: tuple[int | None, ...]
    loss: float
    step_seconds: float | None
    step_bytes: float
    curve: tuple[tuple[float, float], ...] = ()

    @property
    def steps(self) -> int | None:
        """To the target, mean of the seeds; None where one of them didn't reach it."""
        known = [steps for steps in self.seeds if steps is not None]
        return round(sum(known) / len(known)) if known and len(known) == len(self.seeds) else None

    @property
    def full_words(self) -> list[str]:
        """With those for codec and rule that the strategy takes anyway."""
        return in_full(self.words)

    @property
    def seconds(self) -> float | None:
        """To the target."""
        return None if self.steps is None or self.step_seconds is None else self.steps * self.step_seconds

    @property
    def interval_seconds(self) -> tuple[float, float] | None:
        """From the soonest seed to the latest, widened by the forecast's error."""
        if self.steps is None or self.step_seconds is None:
            return None
        known = [steps for steps in self.seeds if steps is not None]
        low, high = 1 - FORECAST_ERROR, 1 + FORECAST_ERROR
        return low * min(known) * self.step_seconds, high * max(known) * self.step_seconds

    @property
    def sent_bytes(self) -> float | None:
        """By all workers, to the target."""
        return None if self.steps is None else self.steps * self.step_bytes


@dataclass(frozen=True)
class Answer:
    """All that were rehearsed.

    Args:
        steps: of each, at most.
        refused: {method on so many workers: why it wasn't rehearsed}.
    """

    target: float
    steps: int
    rows: tuple[Reached, ...]
    refused: dict[str, str]

    def speedup(self, row: Reached) -> float | None:
        """Seconds to the target of ddp on as many workers over the row's."""
        same = (one for one in self.rows if one.words == BASELINE and one.workers == row.workers)
        base = next(same, None)
        return base.seconds / row.seconds if base and base.seconds and row.seconds else None

    def best_of(self, workers: int) -> Reached | None:
        """On so many workers: ddp if nothing gains enough over it; None where no seconds are known."""
        rows = [row for row in self.rows if row.workers == workers and row.seconds]
        pairs = [(Candidate(row.words, row.title), row.seconds or inf) for row in rows]
        found = chosen(pairs, THRESHOLD) or min(pairs, key=lambda pair: pair[1], default=(None, inf))[0]
        return next((row for row in rows if found and row.words == found.words), None)

    @property
    def best(self) -> Reached | None:
        """Of the fewest workers that no larger number beats by enough."""
        found: Reached | None = None
        for workers in sorted({row.workers for row in self.rows}):
            here = self.best_of(workers)
            if here and (found is None or (1 + THRESHOLD) * (here.seconds or inf) <= (found.seconds or inf)):
                found = here
        return found

    def sentences(self) -> list[str]:
        """What follows; last, the best one's words for a command line where there is one."""
        said = [f"not rehearsed: {title}: {why}" for title, why in self.refused.items()]
        best = self.best
        if best is None:
            missing = not any(row.steps for row in self.rows)
            why = f"no method reached {self.target:g} in {self.steps} steps" if missing else "there is no profile"
            return [*said, f"nobody knows the seconds to the target: {why}"]
        largest = max(row.workers for row in self.rows)
        if best.workers < largest:
            said.append(f"more workers than {best.workers} don't pay: up to {largest} gain less than {THRESHOLD:.0%}")
        choice = "stay with ddp" if best.words == BASELINE else f"train with {best.title}"
        where = f"{choice} on {best.workers} workers, learning rates times {best.rate:g}"
        return [*said, where, " ".join(best.full_words)]


def ordered(rows: Sequence[Reached]) -> tuple[Reached, ...]:
    """The soonest first; by steps where no seconds are known, and by loss where the target wasn't reached."""
    return tuple(sorted(rows, key=lambda row: (row.seconds or inf, row.steps or inf, row.loss)))
