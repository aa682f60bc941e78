"""Jobs of a rehearsal, each a method on a number of workers: its steps are timed, then it is trained to the target."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from time import monotonic
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy

from lightning_decentral.gossip.strategy import GossipStrategy
from lightning_decentral.planner.candidates import Candidate
from lightning_decentral.planner.compare import RUNS
from lightning_decentral.planner.forecasts import composed, method_of, strategy_of
from lightning_decentral.planner.plan.optimizer_cost import trained_with
from lightning_decentral.planner.rehearsal.answer import Reached
from lightning_decentral.planner.rehearsal.crew import Crew
from lightning_decentral.planner.rehearsal.excess_loss import Drift
from lightning_decentral.planner.rehearsal.loop_settings import LoopSettings
from lightning_decentral.planner.rehearsal.search import Found, OutOfTime, SearchCourse, beyond, search, updates
from lightning_decentral.planner.rehearsal.worker import copies_of
from lightning_decentral.shared.plan.forecast import Cluster, Setting, drawn, forecast
from lightning_decentral.shared.plan.network import Network
from lightning_decentral.shared.plan.profile import Profile

CARDS = (1.25e6, 6.25e6, 2.5e7, 1.25e8, 1.25e9, 1.25e10)
"""Rates of network cards in the map, in bytes per second: 10, 50 and 200 Mbit/s, 1, 10 and 100 Gbit/s."""
WARM, PROBE = 2, 3  # Steps before timing, and number of timed steps.
NEGLIGIBLE = 1e-3  # Share of the loss: a smaller excess loss doesn't show among a method's differences between seeds.
PAIRS, LONG_SECONDS = 7, 1.0
"""Most timed pairs of steps (on threads, and one worker after the other), and seconds after which no pair begins."""


@dataclass(frozen=True)
class Ask:
    """Arguments that all methods share, as of `rehearse`."""

    module: LightningModule
    data: Any  # data that workers get copies of
    course: SearchCourse
    rates: tuple[float, ...]
    seeds: int
    run_steps: int
    profile: Profile | None
    network: Network | None
    per_node: int
    clip: float | None
    device: torch.device
    threads: Mapping[int, int] = field(default_factory=dict)  # that compute gradients, by the number of workers
    modules: Mapping[str, LightningModule] = field(default_factory=dict)  # of methods with an optimizer of their own

    def module_of(self, method: Candidate) -> LightningModule:
        return self.modules.get(method.overrides, self.module)

    @property
    def updates(self) -> int:
        """Largest number of updates of each worker for a method."""
        return updates(len(self.rates), self.course.steps) + (self.seeds - 1) * self.course.steps


@dataclass(frozen=True)
class RehearsalJob:
    """Job of a rehearsal: a method on a number of workers."""

    workers: int
    method: Candidate

    @property
    def name(self) -> str:
        return f"{self.method.title} on {self.workers} workers"

    @property
    def strategy(self) -> Strategy:
        return strategy_of(self.method.overrides)

    def crew(self, ask: Ask, seed: int, rate: float) -> Crew:
        loop = LoopSettings(ask.clip, rate, ask.run_steps, seed, ask.device)
        given = ask.module_of(self.method), copies_of(ask.data), self.strategy, self.workers, ask.run_steps
        return Crew(*given, per_node=ask.per_node, loop=loop, threads=ask.threads.get(self.workers, 1))


@dataclass(frozen=True)
class Foreknowledge:
    """Measurements on the first gossip method on a number of workers, from which other gossip methods are predicted.

    They are the differences between its workers and, for methods with the same rule and updates, the best learning
    rate."""

    workers: int
    strategy: GossipStrategy
    module: LightningModule
    rate: float
    loss: float
    drift: Drift
    came: float

    def excess(self, ask: Ask, job: RehearsalJob, learning_rate: float | Sequence[float]) -> float | None:
        """Predicted excess loss by the disagreement of workers; None for methods other than gossip with this optimizer,
        at one rate."""
        strategy = job.strategy
        if not isinstance(strategy, GossipStrategy) or ask.module_of(job.method) is not self.module:
            return None
        return self.drift.excess(strategy, job.workers, ask.per_node, learning_rate)

    def at_most(self, ask: Ask, job: RehearsalJob) -> float | None:
        """Predicted excess loss while workers learn fast, at the largest of the learning rates."""
        return self.excess(ask, job, self.drift.learning_rate * max(ask.rates) / self.drift.rate)

    def rates(self, ask: Ask, job: RehearsalJob) -> tuple[float, ...]:
        """Learning rates to try: one, where rule and updates are the same, on as many workers, and disagreement costs
        nothing."""
        if job.workers != self.workers or _updates(job.strategy) != _updates(self.strategy):
            return ask.rates
        cost = self.at_most(ask, job)
        # Measured excess loss of the first method's workers over the predicted one, where they were probed.
        off = self.came / self.drift.excess(self.strategy, self.workers, ask.per_node, self.drift.learning_rate)
        return ask.rates if cost is None or max(1.0, off) * cost > NEGLIGIBLE * self.loss else (self.rate,)


def _updates(strategy: Strategy) -> object:
    """Settings of gossip that make a worker's updates: rule, states, exact steps; None for another strategy."""
    if not isinstance(strategy, GossipStrategy):
        return None
    return strategy.combine, strategy.states, strategy.exact_steps


def timed(ask: Ask, job: RehearsalJob) -> float:
    """Measure the seconds of a step, with its part of a validation; raises the errors that refuse the method."""
    step_costs(ask, job)
    with job.crew(ask, 0, 1.0) as crew:
        for steps in (WARM, PROBE):
            ask.course.tick()
            seconds = _seconds(crew, steps)
        begun = monotonic()
        ask.course.evaluation.loss([worker.module for worker in crew.workers])
        return seconds / PROBE + (monotonic() - begun) / ask.course.every


def threads_ratio(module: LightningModule, data: Any, workers: int, loop: LoopSettings, threads: int) -> float | None:
    """Ratio of a step's median seconds on `threads` threads to those of one worker after the other, without messages.

    None: steps draw random numbers, or fail; training these workers then raises the error."""
    given = module, copies_of(data), None, workers, 1
    try:
        with Crew(*given, loop=loop) as one_by_one, Crew(*given, loop=loop, threads=threads) as some:
            pairs = [(_seconds(some), _seconds(one_by_one))]  # not counted: objects made once are made here
            end = monotonic() + LONG_SECONDS
            while len(pairs) < 2 or (len(pairs) <= PAIRS and monotonic() < end):
                pairs.append((_seconds(some), _seconds(one_by_one)))
    except Exception:  # the module's own optimizer
        return None
    on_threads, in_turn = zip(*pairs[1:], strict=True)
    return float(median(on_threads) / median(in_turn))


def _seconds(crew: Crew, steps: int = 1) -> float:
    begun = monotonic()
    crew.train(steps)
    return monotonic() - begun


def rehearsed(ask: Ask, job: RehearsalJob, known: Foreknowledge | None) -> tuple[Reached, Foreknowledge | None]:
    """Rehearse a job: (its result, measurements on gossip for later jobs)."""
    probes = known is None or known.workers != job.workers
    first = search(partial(job.crew, ask, 0), ask.rates, replace(ask.course, probes=probes))
    found, strategy, learnt = [first, *_further(ask, job, first.rate)], job.strategy, known
    came, drift = first.early or (0.0, None)
    if drift is not None and isinstance(strategy, GossipStrategy):
        learnt = Foreknowledge(job.workers, strategy, ask.module_of(job.method), first.rate, first.loss, drift, came)
    predicting = known or learnt  # by itself where nobody was before
    # Steps to the target where it is near, though not reached.
    foreseen = [None if one.steps is not None else beyond(one.points, ask.course.target) for one in found]
    step_seconds, step_seconds_at = step_costs(ask, job)
    reached = Reached(
        job.method.title, job.method.overrides, job.workers, first.rate,
        tuple(one.steps or there for one, there in zip(found, foreseen, strict=True)),
        sum(one.loss for one in found) / len(found), step_seconds, first.sent_bytes, first.points, any(foreseen),
        step_seconds_at, first.noise, sum(one.excess for one in found) / len(found),
        None if predicting is None else predicting.excess(ask, job, first.learning_rates),
        rates=first.rates, trained=first.trained,
    )  # fmt: skip
    return reached, learnt


def _further(ask: Ask, job: RehearsalJob, rate: float) -> Iterator[Found]:
    """Yield the results of the further seeds, as far as there is time for all of their steps."""
    for seed in range(1, ask.seeds):
        try:
            found = search(partial(job.crew, ask, seed), [rate], ask.course)
        except OutOfTime:
            return
        if found.steps is None and found.trained < ask.course.steps:
            return  # its loss is of an earlier step than the first seed's
        yield found


def step_costs(ask: Ask, job: RehearsalJob) -> tuple[float | None, dict[float, float]]:
    """Return (seconds of a step, {bytes per second of a network card: seconds of a step}), the latter empty where no
    latency is known; (None, {}) without a profile."""
    if ask.profile is None:
        return None, {}
    network, variation = ask.network or Network(ask.profile.network), ask.profile.variation
    optimizer = composed(job.method.overrides).optimizer
    model = trained_with(ask.profile.model, optimizer) if optimizer else ask.profile.model
    where = Setting(model, network, Cluster(job.workers, ask.per_node))
    cost = method_of(job.strategy, where.cluster, 1)
    seconds = forecast(cost, where, drawn(variation, job.workers)).seconds
    if not network.knows("between"):
        return seconds, {}
    latency = network.price("exchange", "between", 2).latency_seconds
    links = {rate: network.linked("between", latency, rate) for rate in CARDS}
    factors = drawn(variation, job.workers, RUNS)
    return seconds, {r: float(cost.seconds(replace(where, network=link), factors).mean()) for r, link in links.items()}
