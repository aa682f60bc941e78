"""Pipeline schedules (1F1B, TeraPipe, zero bubble): the order of a stage's chunks; a chunk is a micro-batch's slice.

    forward(r, m, s)  needs  forward(r - 1, m, s), forward(r, m, s - 1)
    backward(r, m, s) needs  backward(r + 1, m, s), backward(r, m, s + 1), forward(r, m, s)
    weights(r, m, s)  needs  backward(r, m, s)          where a schedule splits the backward

The causal order is written once, in `Action.needs`; `check`, `forecast` and the executor read it.

A stage posts receives before the actions that need them:

    two ahead    the receives of this action and of the next two: one is needed next, one travels meanwhile
    in step      the receives of what is sent before this action, in one order of all stages' actions

Over NCCL a posted receive is a running kernel, and so is a send until its receive is posted. Whatever waits for a whole
device (freed memory, a kernel's first loading, `torch.cuda.synchronize`) waits for both. Two ahead can deadlock: the
sender may need a message of this stage, whose host waits. In step can't: a stage before action X has sent and posted
only messages of actions before X, so it waits only for stages at earlier actions, and the earliest stage continues.

Over gloo a host waits for its messages one by one: two ahead is safe, and in step would be late."""

from abc import ABC, abstractmethod
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate, chain, zip_longest
from typing import ClassVar

from lightning_decentral.pipeline.plan.dynamic_program import at_least_1
from lightning_decentral.shared.plan.timeline import Deadlock, Span, Task, bubble, makespan, run


class Kind(Enum):
    """Kind of work on a chunk: forward, backward, or the gradients of the weights where the backward is split."""

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHTS = "W"


TOWARDS = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.WEIGHTS: -1}
"""Direction of an action's result: 1 to the next stage, -1 to the stage before."""


@dataclass(frozen=True)
class Action:
    """One chunk's forward, backward or weight gradients on one stage; all numbers from 0."""

    kind: Kind
    stage: int
    microbatch: int
    slice: int

    def __str__(self) -> str:
        return f"{self.kind.value} stage {self.stage} micro-batch {self.microbatch} slice {self.slice}"

    def needs(self, num_stages: int, num_slices: int) -> tuple["Action", ...]:
        """Actions that must have ended before this action starts."""
        if self.kind is Kind.WEIGHTS:
            return (replace(self, kind=Kind.BACKWARD),)
        stage, position = self.stage - TOWARDS[self.kind], self.slice - TOWARDS[self.kind]
        needed = [Action(self.kind, stage, self.microbatch, self.slice)] if 0 <= stage < num_stages else []
        if 0 <= position < num_slices:
            needed.append(Action(self.kind, self.stage, self.microbatch, position))
        if self.kind is Kind.BACKWARD:
            needed.append(Action(Kind.FORWARD, self.stage, self.microbatch, self.slice))
        return tuple(needed)


class Schedule(ABC):
    """Order in which each stage of a pipeline takes its actions, for any number of stages and chunks."""

    splits: ClassVar[bool] = False
    """True if the schedule computes gradients of the weights in separate actions, after those of the input."""

    @abstractmethod
    def of_stage(self, stage: int, num_stages: int, num_microbatches: int, num_slices: int) -> Iterator[Action]:
        """Yield the actions of one stage, in order."""

    def actions(self, num_stages: int, num_microbatches: int, num_slices: int) -> list[list[Action]]:
        """List each stage's actions in order. Raises ValueError for a number below 1."""
        at_least_1(num_stages=num_stages, num_microbatches=num_microbatches, num_slices=num_slices)
        return [list(self.of_stage(r, num_stages, num_microbatches, num_slices)) for r in range(num_stages)]


@dataclass(frozen=True)
class TeraPipe(Schedule):
    """All forwards, then all backwards: the activations of all M S chunks are kept at once.

    Source: Li et al. 2102.07988; with one slice it's GPipe, Huang et al. 1811.06965."""

    def of_stage(self, stage: int, num_stages: int, num_microbatches: int, num_slices: int) -> Iterator[Action]:
        forwards = _forwards(stage, num_microbatches, num_slices)
        backwards = _backwards(stage, range(num_microbatches)[::-1], num_slices)
        return chain(forwards, backwards)


@dataclass(frozen=True)
class OneForwardOneBackward(Schedule):
    """1F1B: stage r runs min(P - r - 2 + S, M S) forwards, then one forward and one backward in turn, then the rest.

    Stage r keeps at most min(P - 1 - r + S, M S) chunks. Micro-batches run backward in order, their slices last first.

    Source: Sun et al. 2406.03488 (Seq1F1B); with one slice it's 1F1B, Narayanan et al. 1806.03377."""

    def of_stage(self, stage: int, num_stages: int, num_microbatches: int, num_slices: int) -> Iterator[Action]:
        forwards = list(_forwards(stage, num_microbatches, num_slices))
        backwards = _backwards(stage, range(num_microbatches), num_slices)
        # One less than the maximum that is kept: every turn begins with a forward.
        warm = min(num_stages - stage - 2 + num_slices, len(forwards))
        turns = zip_longest(forwards[warm:], backwards)
        return chain(forwards[:warm], (action for turn in turns for action in turn if action is not None))


@dataclass(frozen=True)
class ZeroBubble(Schedule):
    """1F1B with a split backward: stage r computes gradients of the weights r chunks after those of the input.

        seconds = 3 M S + P - 1        chunks of equal cost, each third of a chunk 1, (M - 1) S >= P - 1
                  3 S + 2 (P - 1)      a single micro-batch: nothing is left to fill the first wait with

    1F1B takes 3 (M S + P - 1). Every stage keeps at most min(P - 1 + S, M S) chunks, like the first stage of 1F1B.

    Source: Qi et al. 2401.10241 (ZB-H1), here over slices."""

    splits: ClassVar[bool] = True

    def of_stage(self, stage: int, num_stages: int, num_microbatches: int, num_slices: int) -> Iterator[Action]:
        halves: deque[Action] = deque()
        for action in OneForwardOneBackward().of_stage(stage, num_stages, num_microbatches, num_slices):
            yield action
            if action.kind is Kind.BACKWARD:
                halves.append(replace(action, kind=Kind.WEIGHTS))
            # So stage r keeps r chunks more than under 1F1B: as many as the first stage, which keeps most.
            if len(halves) > stage:
                yield halves.popleft()
        yield from halves


def _forwards(stage: int, num_microbatches: int, num_slices: int) -> Iterator[Action]:
    return (Action(Kind.FORWARD, stage, m, s) for m in range(num_microbatches) for s in range(num_slices))


def _backwards(stage: int, microbatches: Sequence[int], num_slices: int) -> Iterator[Action]:
    # Last slice first: a slice's gradient isn't complete before the backward of those that read its keys and values.
    return (Action(Kind.BACKWARD, stage, m, s) for m in microbatches for s in reversed(range(num_slices)))


def check(stages: Sequence[Sequence[Action]], num_microbatches: int, num_slices: int) -> None:
    """Raise ValueError unless every stage takes every chunk forward and backward exactly once, without a deadlock."""
    for stage, actions in enumerate(stages):
        complete = {*_forwards(stage, num_microbatches, num_slices)}
        complete |= {*_backwards(stage, range(num_microbatches), num_slices)}
        if any(action.kind is Kind.WEIGHTS for action in actions):
            complete |= {replace(a, kind=Kind.WEIGHTS) for a in complete}
        wrong = complete ^ set(actions)
        if wrong or len(actions) != len(complete):
            found = min(map(str, wrong)) if wrong else "an action twice"
            raise ValueError(
                f"stage {stage} must take every chunk once each way: {found} is missing, foreign or repeated"
            )
    # Transfers never block their sender, so an action that can't start here is the only possible deadlock.
    try:
        equally_long(stages, num_slices)
    except Deadlock as error:
        raise ValueError(f"the schedule deadlocks: {error}") from error


def equally_long(stages: Sequence[Sequence[Action]], num_slices: int) -> dict[Action, Span]:
    """Span of each action if every action takes a second, and a message no time. Raises `Deadlock`."""
    return run([Task(a, f"stage {a.stage}", 1.0, a.needs(len(stages), num_slices)) for stage in stages for a in stage])


def in_flight(actions: Sequence[Action], tokens: Sequence[int] | None = None) -> int:
    """Maximum number of chunks whose activations a stage keeps at once; with `tokens` (one per slice), of tokens."""
    splits = any(action.kind is Kind.WEIGHTS for action in actions)
    change = {Kind.FORWARD: 1, Kind.WEIGHTS if splits else Kind.BACKWARD: -1}
    weights = [1 if tokens is None else tokens[action.slice] for action in actions]
    return max(accumulate((change.get(a.kind, 0) * w for a, w in zip(actions, weights, strict=True)), initial=0))


Costs = Callable[[Action], float]


@dataclass(frozen=True)
class ScheduleForecast:
    """Forecast of one step: spans, seconds, the bubble, and chunks in flight."""

    spans: dict[str, Span]
    seconds: float
    bubble: float
    chunks_in_flight: tuple[int, ...]  # The maximum that each stage keeps at once.


def always(seconds: float) -> Costs:
    """Every action takes the same time."""
    return lambda action: seconds


AT_ONCE = always(0.0)


def tasks(stages: Sequence[Sequence[Action]], num_slices: int, seconds: Costs, link: Costs) -> list[Task[str]]:
    """Turn actions into tasks of the timeline, named `str(action)`; a message that takes time is a task, too."""
    found: list[Task[str]] = []
    for actions in stages:
        for action in actions:
            needs = []
            for needed in action.needs(len(stages), num_slices):
                link_seconds = 0.0 if needed.stage == action.stage else link(needed)
                if link_seconds == 0:
                    needs.append(str(needed))
                    continue
                message = f"{needed} -> stage {action.stage}"
                # A message doesn't hold up the next one: latency, not occupancy, so each message is its own worker.
                found.append(Task(message, message, link_seconds, (str(needed),)))
                needs.append(message)
            found.append(Task(str(action), f"stage {action.stage}", seconds(action), tuple(needs)))
    return found


def forecast(
    schedule: Schedule, num_stages: int, num_microbatches: int, num_slices: int, seconds: Costs, link: Costs = AT_ONCE
) -> ScheduleForecast:
    """Forecast one training step under a schedule.

    Args:
        seconds: of one action; a schedule that splits the backward gets half of it for each part.
        link: seconds from the end of an action until the next stage has its result.
    """
    stages = schedule.actions(num_stages, num_microbatches, num_slices)
    spans = run(tasks(stages, num_slices, halved(seconds) if schedule.splits else seconds, link))
    workers = [f"stage {r}" for r in range(num_stages)]
    shown = {name: span for name, span in spans.items() if span.worker in workers}
    return ScheduleForecast(
        shown, makespan(shown), bubble(shown, workers), tuple(in_flight(actions) for actions in stages)
    )


def halved(seconds: Costs) -> Costs:
    """Costs of a split backward: each half computes one of the backward's two matrix products, in half the time."""

    def cost(action: Action) -> float:
        return seconds(action) if action.kind is Kind.FORWARD else seconds(replace(action, kind=Kind.BACKWARD)) / 2

    return cost


# ---- when a stage posts its receives ---------------------------------------------------------------------------------

AHEAD = 2
Posts = Mapping[Action, Sequence[Action]]  # action -> actions whose receives are posted before it, in order.


def two_ahead(actions: Sequence[Action]) -> Posts:
    """Plan for a stage with these actions when it posts receives: two actions ahead."""
    coming = [action for action in actions if action.kind is not Kind.WEIGHTS]
    later = zip(coming[1:], coming[AHEAD + 1 :], strict=False)
    return {coming[0]: coming[: AHEAD + 1], **{action: [expected] for action, expected in later}}


def in_step(stages: Sequence[Sequence[Action]], num_slices: int) -> list[Posts]:
    """Plan for each stage when it posts receives: in step. Every stage must pass the same actions."""
    # Ordered by start. Of actions that start at once, senders come first, so that a message is received before its
    # turn. Any order would do in which no action comes before those that it needs.
    spans = equally_long(stages, num_slices).items()
    order = {a: (span.start, a.kind is not Kind.FORWARD, a.stage * TOWARDS[a.kind]) for a, span in spans}

    def posts(own: Sequence[Action]) -> Posts:
        found: dict[Action, list[Action]] = {}
        moments = [order[action] for action in own]
        for action in own:
            for needed in action.needs(len(stages), num_slices):
                if needed.stage != action.stage:
                    found.setdefault(own[bisect(moments, order[needed])], []).append(action)
        return found

    return [posts(own) for own in stages]
