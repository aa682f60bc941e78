"""A schedule with costs as tasks: makespan, bubble and memory before anything runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lightning_decentral.pipeline.schedule import Action, Kind, Schedule, in_flight
from lightning_decentral.timeline import Span, Task, bubble, makespan, run

Costs = Callable[[Action], float]


@dataclass(frozen=True)
class Forecast:
    """What one step will take."""

    spans: dict[str, Span]
    seconds: float
    bubble: float
    chunks_in_flight: tuple[int, ...]
    """The most that each stage holds at once."""


def always(seconds: float) -> Costs:
    """The same, whatever the action."""
    return lambda action: seconds


AT_ONCE = always(0.0)


def tasks(stages: Sequence[Sequence[Action]], num_slices: int, seconds: Costs, link: Costs) -> list[Task[str]]:
    """Actions as tasks named `str(action)`; between two stages lies a task of the link, if it takes time."""
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
    schedule: Schedule,
    num_stages: int,
    num_microbatches: int,
    num_slices: int,
    seconds: Costs,
    link: Costs = AT_ONCE,
) -> Forecast:
    """The run of a schedule.

    Args:
        seconds: of one action; a schedule that splits the backward gets half of it for each part.
        link: from the end of an action to when the next stage has its result.
    """
    stages = schedule.actions(num_stages, num_microbatches, num_slices)
    spans = run(tasks(stages, num_slices, halved(seconds) if schedule.splits else seconds, link))
    workers = [f"stage {r}" for r in range(num_stages)]
    shown = {name: span for name, span in spans.items() if span.worker in workers}
    return Forecast(shown, makespan(shown), bubble(shown, workers), tuple(in_flight(actions) for actions in stages))


def halved(seconds: Costs) -> Costs:
    """Of a backward in two halves: each multiplies one of the two matrices that the whole does."""

    def cost(action: Action) -> float:
        return seconds(action) if action.kind is Kind.FORWARD else seconds(replace(action, kind=Kind.BACKWARD)) / 2

    return cost


def by_slice(forward: Sequence[float], backward: Sequence[float]) -> Costs:
    """The same costs on every stage: one number per slice for each direction."""
    return lambda action: {Kind.FORWARD: forward, Kind.BACKWARD: backward}[action.kind][action.slice]
