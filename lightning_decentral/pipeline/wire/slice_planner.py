"""Planner of slices: for each new sequence length, plans where to cut, the same on every stage.

Stage costs are measured in a few real steps of all stages together, in 1, 2, 4, 8 and 16 equal slices:

    t = p w_S      p    processor seconds of a chunk among S slices, the mean of ROUNDS steps
                   w_S  factor for which the timeline of w_S p and the messages is as long as the median such step

So a chunk is measured in real conditions: while other stages compute and share memory (with a single slice: while
they wait), with the keys and values of the whole sequence, gradients added to those of later slices. On a device p is
read from the clock."""

import statistics
import time
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from lightning_decentral.pipeline.compute.model import Call
from lightning_decentral.pipeline.plan.cost import (
    Link,
    Measured,
    StageCost,
    expected,
    fit,
    message_seconds,
    priced,
    through,
)
from lightning_decentral.pipeline.plan.schedule import Action, Costs, Kind, Schedule, ScheduleForecast, forecast, tasks
from lightning_decentral.pipeline.plan.slicing import Situation, Slicing, equal
from lightning_decentral.pipeline.wire.executor import Clock
from lightning_decentral.pipeline.wire.stage_runner import StageRunner
from lightning_decentral.shared.compute import cuda
from lightning_decentral.shared.plan.timeline import makespan, run
from lightning_decentral.shared.wire.objects import gather_objects, gather_rows
from lightning_decentral.shared.wire.transport import Transport

ROUNDS = 3
HALVINGS = 30  # a timeline grows with the factor: no other root
COUNTS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class MeasuredSteps:
    """Measurements of one step of all stages, repeated several times."""

    slices: tuple[int, ...]
    seconds: float  # the median of the steps
    own: Mapping[Action, float]  # processor seconds of each action, the mean
    loss_seconds: float  # the loss's part of `own`

    def stretch(self, actions: Sequence[Sequence[Action]], links: Sequence[Link]) -> float:
        """Return w_S; messages that were measured to take longer than the step count as free."""
        link = partial(message_seconds, links, self.slices)
        most = self.seconds / self._makespan(actions, 1.0, lambda action: 0.0)
        if self._makespan(actions, 0.0, link) >= self.seconds:
            return most
        low, high = 0.0, most
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self._makespan(actions, middle, link) < self.seconds else (low, middle)
        return high

    def _makespan(self, actions: Sequence[Sequence[Action]], factor: float, link: Costs) -> float:
        return makespan(run(tasks(actions, len(self.slices), lambda action: factor * self.own[action], link)))


def profile(pipe: StageRunner, call: Call) -> StageCost:
    """Measure this stage with one micro-batch, all stages together; changes no random state, and removes the gradients
    of the model's parameters. Collective. ValueError: the sequence is too short for a fit."""
    device, length = call.inputs.device, pipe.model.length(call)
    if length < max(COUNTS):
        raise ValueError(f"{length} tokens are too few to measure slices of: use slicing=Uniform(n) or Given(lengths)")
    cut = [equal(length, n) for n in COUNTS]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        measured = [_measured(pipe, call, slices) for slices in cut]
        links = pipe.gather(ping(pipe, call))
    return fitted(measured, pipe.schedule, pipe.rank, links)


def _measured(pipe: StageRunner, call: Call, slices: tuple[int, ...]) -> MeasuredSteps:
    """Run steps as in training, where a step reuses the memory of the step before; the first step doesn't
    count."""
    now = clock(call.inputs.device)
    # Processor time excludes other work on the machine, but doesn't see a device's work.
    own = time.thread_time if call.inputs.device.type == "cpu" else now
    steps = []
    for _ in range(1 + ROUNDS):
        begin = now()
        executor = pipe.train([call], slices, _loss, own)
        seconds = now() - begin
        for parameter in pipe.model.module.parameters():
            parameter.grad = None
        rows = pipe.gather((seconds, executor.own_seconds, executor.loss_seconds))
        steps.append((max(taken for taken, _, _ in rows), ChainMap(*(stage for _, stage, _ in rows)), rows[-1][-1]))
    taken, each, losses = zip(*steps[1:], strict=True)
    mean = {action: statistics.mean(step[action] for step in each) for action in each[0]}
    return MeasuredSteps(slices, statistics.median(taken), mean, statistics.mean(losses))


def _loss(_: int, logits: Tensor) -> Tensor:  # (batch, length, vocabulary)
    """Cross entropy with the first token as every target: any targets take as long."""
    flat = logits.flatten(0, -2).float()
    return functional.cross_entropy(flat, torch.zeros(len(flat), dtype=torch.int64, device=flat.device))


def fitted(measured: Sequence[MeasuredSteps], schedule: Schedule, stage: int, links: Sequence[Link]) -> StageCost:
    """Fit a stage's costs to measured steps in several numbers of slices; a split backward counts as one."""
    there, back, losses, stretches = [], [], [], []
    for steps in measured:
        actions = schedule.actions(len(links), 1, len(steps.slices))
        stretches.append(stretch := steps.stretch(actions, links))
        losses.append(stretch * steps.loss_seconds if stage == len(links) - 1 else 0.0)
        for index, tokens in enumerate(steps.slices):
            own = [
                (action.kind is Kind.FORWARD, steps.own[action]) for action in actions[stage] if action.slice == index
            ]
            place = tokens, sum(steps.slices[:index])
            # The loss ran within the last forward, and is measured separately.
            closing = losses[-1] if index == len(steps.slices) - 1 else 0.0
            there.append(Measured(*place, stretch * sum(t for forward, t in own if forward) - closing))
            back.append(Measured(*place, stretch * sum(t for forward, t in own if not forward)))
    return StageCost(fit(there), fit(back), statistics.mean(losses), links[stage], max(stretches))


TIMES = 7
SHORT = 16


def ping(pipe: StageRunner, call: Call) -> Link:
    """Measure the link between this stage and the next, one pair at a time; zeros behind the last one. Collective."""
    length, link = pipe.model.length(call), Link()
    for stage in range(pipe.size - 1):
        if pipe.rank in (stage, stage + 1):
            found = [(tokens, _one_way(pipe, call, tokens, stage)) for tokens in (max(1, length // SHORT), length)]
            link = through(*found) if pipe.rank == stage else link
    return link


def _one_way(pipe: StageRunner, call: Call, tokens: int, stage: int) -> float:
    """Return half the median round trip, without the first; on the next stage a meaningless number."""
    channel, now = pipe.channel([call], [(0, tokens)]), clock(call.inputs.device)
    known = pipe.model.shape(call, 0, tokens)
    assert known is not None
    message = torch.ones(known[0], dtype=known[1], device=call.inputs.device)
    there, back, times = Action(Kind.FORWARD, pipe.rank, 0, 0), Action(Kind.BACKWARD, pipe.rank, 0, 0), list[float]()
    for _ in range(TIMES + 1):
        begin = now()
        if pipe.rank == stage:
            channel.send(there, message)
            channel.expect(back)  # not before the message that it answers (`in_step`)
            channel.receive(back)
        else:
            channel.expect(there)
            channel.receive(there)
            channel.send(back, message)
            channel.close()
        times.append(now() - begin)
    return statistics.median(times[1:]) / 2


def clock(device: torch.device) -> Clock:
    """Seconds by the clock, read after the device has finished the current stream's work."""
    if device.type == "cpu":
        return time.perf_counter

    def now() -> float:
        # Not the whole device: other streams have receives that end only when the other stage answers.
        cuda.current_stream(device).synchronize()
        return time.perf_counter()

    return now


class SlicePlanner:
    """Plans the slices for each micro-batch size and sequence length, under one schedule."""

    def __init__(self, schedule: Schedule, microbatches: int) -> None:
        self._schedule, self.microbatches = schedule, microbatches
        self.slices: dict[str, list[int]] = {}
        self.profiles: list[StageCost] = []
        """Measured costs of the stages, if the slicing measures."""
        self._measured = (0, 0, 0)
        self.stages: list[str] = []
        """Description of each stage's blocks."""

    def plan(
        self, slicing: Slicing, call: Call, pipe: StageRunner, world: Transport | None, planned: Callable[[], None]
    ) -> list[int]:
        """Return the slices for a call; the first call of a length and size makes a plan, and calls `planned`.
        Collective over `world`.

        A slicing that measures removes gradients: all stages' costs are measured before a step that needs it. A
        measurement serves all sequences that aren't longer, with this batch size, and with a mask only if it had one.
        """
        length = pipe.model.length(call)
        if slicing.measures:
            # The first pipeline's call decides: others may be longer or shorter, but all must measure in the same step.
            batch, longest, masked = call.inputs.shape[0], length, int(call.attention_mask is not None)
            if world is not None and world.size > pipe.size:
                batch, longest, masked = gather_rows(world, torch.tensor((batch, longest, masked)))[0].tolist()
            if batch != self._measured[0] or longest > self._measured[1] or masked > self._measured[2]:
                cost = profile(pipe, call)
                # The first pipeline's lengths, so that a length has one plan.
                self.profiles = [cost] if world is None else gather_objects(world, cost)[: pipe.size]
                self._measured = batch, longest, masked
        key = f"{call.inputs.shape[0]} x {length}{'' if call.attention_mask is None else ', masked'}"
        if key not in self.slices:  # a length keeps its plan, also if a later measurement differs
            self.slices[key] = list(slicing.slices(length, self.situation(pipe.size)))
            planned()
        return self.slices[key]

    def situation(self, num_stages: int) -> Situation:
        """Make the situation for which slices are planned; without measurements a slice costs its length."""
        if self.profiles:
            return priced(self.profiles, self._schedule, self.microbatches)
        return Situation(
            num_stages=num_stages,
            seconds=lambda tokens, context: float(tokens),
            num_microbatches=self.microbatches,
            schedule=self._schedule,
        )

    def expected(self) -> ScheduleForecast | None:
        """Forecast a step with the latest plan by its timeline; None without measurements."""
        if not self.slices or not self.profiles:
            return None
        return expected(self.profiles, self._schedule, self.microbatches, [*self.slices.values()][-1])

    def summary(self) -> dict[str, str]:
        """Describe stages, slices, bubble and memory as text."""
        slices, found = ([*self.slices.values()] or [[]])[-1], self.expected()
        sizes = len(self.stages), self.microbatches, max(1, len(slices))
        equal = forecast(self._schedule, *sizes, lambda action: 1.0)
        measured = f"; {found.bubble:.1%} and {found.seconds:.4g} s a step by measured costs" if found else ""
        errors = [cost.error for profile in self.profiles for cost in (profile.forward, profile.backward)]
        stretch = max((profile.stretch for profile in self.profiles), default=1.0)
        off = f"at most {max(errors, default=0):.1%} off (root mean square)"
        fitted = {"fit of the costs": f"{off}, steps up to {stretch:.2f} times the timeline of their parts"}
        held = ", ".join(map(str, equal.chunks_in_flight))
        return {
            **{f"stage {r}": text for r, text in enumerate(self.stages)},
            "slices": f"{len(slices)} of {', '.join(map(str, slices))} tokens" if slices else "not planned yet",
            "micro-batches": str(self.microbatches),
            "bubble": f"{equal.bubble:.1%} with slices of equal cost{measured}",
            **(fitted if errors else {}),
            "memory": f"at most {held} slices of a sequence at once on stages 0, 1, ..",
        }
