"""Steps to a loss, at the best of a few learning rates: successive halving, in which every rate gets the same steps.

rung k of m:  all that are left train on to step  steps / 2^(m - k);  the better half of them goes on
reached       the first step at which the mean over workers and the last `window` steps is at most the target
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import ceil, inf, isfinite, log2

from lightning_decentral.planner.rehearsal.crew import Crew

CHUNK = 5
"""Steps between two looks at the losses and at the clock."""
WINDOW = 10


@dataclass(frozen=True)
class Found:
    """What a method came to.

    Args:
        rate: what learning rates were multiplied by.
        steps: until the target; None where it wasn't reached.
        losses: of each step, mean of the workers.
        sent_bytes: of all workers in a step, mean of the steps.
    """

    rate: float
    steps: int | None
    losses: tuple[float, ...]
    sent_bytes: float


def reached(losses: Sequence[float], target: float, window: int = WINDOW) -> int | None:
    """The first step, counted from 1, whose mean of the last `window` losses is at most the target."""
    for end in range(window, len(losses) + 1):
        if sum(losses[end - window : end]) / window <= target:
            return end
    return None


def rungs(rates: int, steps: int) -> list[int]:
    """Steps after which half of the rates are left behind; the last one is the end."""
    halvings = ceil(log2(rates)) if rates > 1 else 0
    return [max(1, steps >> (halvings - k)) for k in range(halvings)] + [steps]


def updates(rates: int, steps: int) -> int:
    """Of each worker, at most, for one method."""
    done, before, left = 0, 0, rates
    for rung in rungs(rates, steps):
        done, before, left = done + left * (rung - before), rung, ceil(left / 2)
    return done


def search(
    make: Callable[[float], Crew], rates: Sequence[float], steps: int, target: float, tick: Callable[[], None]
) -> Found:
    """Of the rates, the one that reaches the target soonest or else has the lowest loss.

    Args:
        make: workers at so many times their learning rates.
        tick: called between steps; what it raises ends the search.
    """
    with ExitStack() as crews:
        left = [(rate, crews.enter_context(make(rate))) for rate in rates]
        for rung in rungs(len(rates), steps):
            for _, crew in left:
                _train(crew, rung - len(crew.losses), target, tick)
            left.sort(key=lambda pair: _order(pair[1], target))
            if reached(_means(left[0][1]), target) is not None:
                break
            left = left[: ceil(len(left) / 2)]
        return _found(*left[0], target)


def _train(crew: Crew, steps: int, target: float, tick: Callable[[], None]) -> None:
    while steps > 0 and reached(_means(crew), target) is None:
        tick()
        crew.train(min(CHUNK, steps))
        steps -= CHUNK


def _means(crew: Crew) -> list[float]:
    return [float(row.mean()) for row in crew.losses]


def _order(crew: Crew, target: float) -> tuple[float, float]:
    """Less is better: steps to the target, then the last losses; those that are no number last."""
    means = _means(crew)
    last = sum(means[-WINDOW:]) / max(1, len(means[-WINDOW:]))
    return reached(means, target) or inf, last if isfinite(last) else inf


def _found(rate: float, crew: Crew, target: float) -> Found:
    means = _means(crew)
    sent = sum(member.sent_bytes for member in crew.members) / max(1, len(means))
    crew.release()
    return Found(rate, reached(means, target), tuple(means), sent)
