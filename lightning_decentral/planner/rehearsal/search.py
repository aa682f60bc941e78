"""Steps to a loss, at the best of a few learning rates: successive halving, in which every rate gets the same steps.

mark     every so many steps: the loss of the mean of the workers' models on held-out batches
point k  middle and mean of the marks k - 1 and k: halves a mark's noise, without a lag
rung k   of m: all remaining rates train to step  (k + 1) / (m + 1) steps;  the better half of them goes on
reached  where the line through the points first reaches the target
beyond   where loss = a + b log(step), fitted to the last third of the points, does, within 1.5 times the last step"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil, exp, inf, isfinite, log, log2

import numpy as np

from lightning_decentral.planner.rehearsal.answer import BEYOND
from lightning_decentral.planner.rehearsal.crew import Crew
from lightning_decentral.planner.rehearsal.evaluation import HeldOutEvaluation
from lightning_decentral.planner.rehearsal.excess_loss import Drift, excess_now, probed


class OutOfTime(Exception):
    """Raised when the minutes, or a method's share of them, are over."""


MARKS = 20  # Number of marks in the steps of a rehearsal.
Point = tuple[float, float]


@dataclass(frozen=True)
class Found:
    """Result of a method for one seed."""

    rate: float  # factor of the learning rates
    steps: int | None  # steps to the target; None if the target wasn't reached
    points: tuple[Point, ...]  # (step, validation loss), smoothed
    sent_bytes: float  # of all workers in a step, mean of the steps
    noise: float | None  # of the gradients, in batches of a worker; None where workers drift
    excess: float  # mean of the workers' own losses in the end, less the loss of their mean
    learning_rates: tuple[float, ...]  # of each step
    trained: int  # steps taken; fewer than asked for if the target was reached, or time ran out
    # Of drifting workers at the first large learning rate that the search left, before a schedule shortens steps:
    # (excess loss, differences; None if the course doesn't ask for them, or losses don't show them).
    early: tuple[float, Drift | None] | None = None
    rates: int = 1  # number of rates that were trained

    @property
    def loss(self) -> float:
        return self.points[-1][1]


@dataclass(frozen=True)
class SearchCourse:
    """Settings that all rates and seeds are trained with: steps, target and evaluation."""

    steps: int
    target: float
    evaluation: HeldOutEvaluation
    tick: Callable[[], None]  # called at each mark; what it raises ends the search
    probes: bool = False  # whether workers that drift are probed, where a rate is left behind

    @property
    def every(self) -> int:
        return max(1, self.steps // MARKS)


@dataclass
class Track:
    """Training of a crew at one learning rate, with its losses at the marks."""

    rate: float
    crew: Crew
    course: SearchCourse
    marks: list[Point] = field(default_factory=list)

    @property
    def points(self) -> list[Point]:
        return smoothed(self.marks)

    @property
    def reached(self) -> int | None:
        return reached(self.points, self.course.target)

    @property
    def diverged(self) -> bool:
        return bool(self.marks) and not isfinite(self.marks[-1][1])

    def train_to(self, step: int) -> None:
        """Train to the first mark at or after the step, to the target, or until losses are NaN or infinite."""
        while (done := len(self.crew.losses)) < step and self.reached is None and not self.diverged:
            self.course.tick()
            try:
                self.crew.train(min(self.course.every, self.course.steps - done))
            except FloatingPointError:  # gossip heals a worker a limited number of times
                loss = inf
            else:
                loss = self.course.evaluation.loss([worker.module for worker in self.crew.workers])
            self.marks.append((float(len(self.crew.losses)), loss))

    def order(self, mark: int) -> tuple[float, float]:
        """Sort key, smaller is better: steps to the target, then the loss at this or the last mark; NaN comes last."""
        loss = inf if self.diverged else self.points[:mark][-1][1]
        return self.reached or inf, loss

    def found(self) -> Found:
        if self.diverged:
            raise ValueError(
                f"its losses end at {self.marks[-1][1]}, at the best with learning rates times {self.rate:g}"
            )
        sent = sum(member.sent_bytes for member in self.crew.members) / len(self.crew.losses)
        self.crew.release()
        noise, excess = self.crew.noise.scale, excess_now(self.crew, self.course.evaluation)
        learning_rates = tuple(self.crew.learning_rates)
        return Found(
            self.rate, self.reached, tuple(self.points), sent, noise, excess, learning_rates, len(learning_rates)
        )

    def early(self) -> tuple[float, Drift | None] | None:
        """Measure the disagreement of a crew that is no longer needed; None if its workers are equal, or diverged."""
        if self.crew.alike or self.diverged:
            return None
        excess = excess_now(self.crew, self.course.evaluation)
        return excess, probed(self.crew, self.course.evaluation, self.rate) if self.course.probes else None


def ranked(tracks: Sequence[Track]) -> list[Track]:
    """Sort tracks, the best first, by losses at the last common mark of those neither diverged nor at the target."""
    left = [len(track.marks) for track in tracks if track.reached is None and not track.diverged]
    return sorted(tracks, key=lambda track: track.order(min(left, default=len(track.marks))))


def smoothed(marks: Sequence[Point]) -> list[Point]:
    """Smooth marks: midpoints and means of neighbouring marks; the first mark doesn't change."""
    return [*marks[:1], *(((a + b) / 2, (x + y) / 2) for (a, x), (b, y) in pairwise(marks))]


def reached(points: Sequence[Point], target: float) -> int | None:
    """The step, rounded up, at which straight lines between the points first reach the target."""
    if points and points[0][1] <= target:
        return ceil(points[0][0])
    for (a, x), (b, y) in pairwise(points):
        if y <= target:
            return ceil(a + (b - a) * (x - target) / (x - y)) if isfinite(x) else ceil(b)
    return None


def beyond(points: Sequence[Point], target: float) -> int | None:
    """The step, rounded up, where a line through the last third of the points reaches the target; None if too far."""
    some = [point for point in points[-max(3, len(points) // 3) :] if point[0] > 0 and isfinite(point[1])]
    if len(some) < 3:
        return None
    steps, losses = np.array(some).T
    slope, start = np.polyfit(np.log(steps), losses, 1)
    # Compared as logarithms: where the losses hardly fall, the step itself would be no number.
    end, step = some[-1][0], (target - start) / slope if slope < 0 else inf
    # The line may be at the target already though the points aren't.
    return ceil(max(exp(step), end)) if step <= log(BEYOND * end) else None


def rungs(rates: int, steps: int) -> list[int]:
    """Steps after which half of the rates are left behind; the last one is the end."""
    halvings = ceil(log2(rates)) if rates > 1 else 0
    return [ceil(steps * (k + 1) / (halvings + 1)) for k in range(halvings + 1)]


def updates(rates: int, steps: int) -> int:
    """Number of updates of each worker, for one method and seed, up to the distance of two marks."""
    done, before, left = 0, 0, rates
    for rung in rungs(rates, steps):
        done, before, left = done + left * (rung - before), rung, ceil(left / 2)
    return done


def search(make: Callable[[float], Crew], rates: Sequence[float], course: SearchCourse) -> Found:
    """Search the rates for the one that reaches the target in the fewest steps or else has the lowest loss. `make`:
    makes the crew, given the factor of its learning rates. When time is over, the best result so far is returned.
    ValueError: all diverged. OutOfTime: nothing was trained."""
    with ExitStack() as crews:
        left = tracks = [Track(rate, crews.enter_context(make(rate)), course) for rate in rates]
        early: tuple[float, Drift | None] | None = None
        for rung in rungs(len(rates), course.steps):
            try:
                for track in left:
                    track.train_to(rung)
            except OutOfTime:
                left = ranked([track for track in left if track.marks])
                if not left:
                    raise
                break
            left = ranked(left)
            if left[0].reached is not None:
                break
            left, behind = left[: ceil(len(left) / 2)], left[ceil(len(left) / 2) :]
            for track in behind:
                early = early or track.early()
        return replace(left[0].found(), early=early, rates=sum(bool(track.marks) for track in tracks))
