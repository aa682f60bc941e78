"""`rehearse`: a module trained as n workers on this machine under several methods: how soon each reaches a loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader

from lightning_decentral.planner.candidates import BASELINE, OUTER, STREAM, Candidate
from lightning_decentral.planner.forecasts import method_of, strategy_of
from lightning_decentral.planner.rehearsal.answer import Answer, Reached, ordered, said
from lightning_decentral.planner.rehearsal.batches import loader_of, shared_out
from lightning_decentral.planner.rehearsal.clock import Clock, OutOfTime
from lightning_decentral.planner.rehearsal.crew import Crew
from lightning_decentral.planner.rehearsal.evaluation import Evaluation, held_out
from lightning_decentral.planner.rehearsal.search import Course, search, updates
from lightning_decentral.planner.rehearsal.stacked import tried
from lightning_decentral.planner.rehearsal.worker import CPU, Loop
from lightning_decentral.planner.variations import RUNS
from lightning_decentral.shared.compute import cuda
from lightning_decentral.shared.plan.forecast import Cluster, Method, Setting, drawn, forecast
from lightning_decentral.shared.plan.network import Network
from lightning_decentral.shared.plan.profile import Profile

METHODS = (
    Candidate(BASELINE, "ddp"),
    Candidate("strategy=compressed", "compressed, int8"),
    Candidate("strategy=gossip", "gossip"),
    Candidate("strategy=gossip strategy/topology=ring", "gossip, ring"),
    Candidate("strategy=gossip strategy/codec=int8", "gossip, int8"),
    Candidate(f"{STREAM} strategy/combine=outer_nesterov {OUTER}", "streamed outer rounds"),
)
RATES = (0.5, 1.0, 2.0)
CARDS = (1.25e6, 6.25e6, 2.5e7, 1.25e8, 1.25e9, 1.25e10)
"""Bytes per second, of the map: 10, 50 and 200 Mbit/s, 1, 10 and 100 Gbit/s."""

WARM, PROBE = 2, 3
"""Steps before a probe, and those that it times."""
FEWEST = 10
"""Steps of a rehearsal."""
MARGIN = 0.9
"""Of the time that is left, what steps are planned for."""
PAYS = 0.9
"""Of the time of one worker after the other: what gains less isn't worth that bits differ."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class Ask:
    """What all methods are rehearsed alike with; arguments as of `rehearse`, but `stacked`: for which workers."""

    module: LightningModule
    loader: DataLoader[Any]
    course: Course
    rates: tuple[float, ...]
    seeds: int
    run_steps: int
    profile: Profile | None
    network: Network | None
    per_node: int
    clip: float | None
    device: torch.device
    stacked: frozenset[int] = frozenset()

    @property
    def updates(self) -> int:
        """Of each worker, for a method, at most."""
        return updates(len(self.rates), self.course.steps) + (self.seeds - 1) * self.course.steps


Job = tuple[int, Candidate]
"""Workers, and a method for them."""


def rehearse(
    module: LightningModule,
    data: LightningDataModule | DataLoader[Any] | None = None,
    *,
    workers: Sequence[int],
    target: float,
    methods: Sequence[str] | None = None,
    steps: int = 300,
    rates: Sequence[float] = RATES,
    seeds: int = 2,
    validation: DataLoader[Any] | None = None,
    run_steps: int | None = None,
    profile: Profile | None = None,
    network: Network | None = None,
    per_node: int = 1,
    clip: float | None = None,
    minutes: float = 10.0,
    stacked: bool | None = None,
    device: str = "cpu",
    say: Callable[[str], None] = lambda text: None,
) -> Answer:
    """Train copies of a module, which stays as it is, as so many workers on one device under each method.

    Each worker gets the batches that Lightning would serve it. No callbacks, hooks or accumulation of gradients.

    Args:
        target: validation loss of the mean of the workers' models: of `training_step`, on the first batches.
        methods: words of the command line, as `strategy=gossip strategy/topology=ring`; ddp joins them.
        rates: what the module's learning rates are multiplied by; every method gets the same, by successive halving.
        seeds: of the order of batches and of random numbers, at the best rate; initial values are the module's.
        validation: in place of the datamodule's or the module's own.
        run_steps: of the training that schedules are made for; as many as are asked for here.
        profile: gives the seconds of a step.
        network: that they are forecast on; the profile's.
        clip: the Trainer's `gradient_clip_val`.
        minutes: it takes at most: fewer steps where they wouldn't do, and methods that get no turn are said.
        stacked: all workers' gradients are computed at once, equal to rounding; None: where that is faster. One after
            the other where the module doesn't allow it, which is said.
        device: "cpu", or "cuda" for the first device that is visible.
        say: hears how long it will take, and how far it is.

    Raises:
        ValueError: the module can't be rehearsed, there is nothing to validate by, or an argument is wrong.
    """
    _check(workers, steps, rates, seeds, minutes)
    clock, place = Clock(minutes), _device(device)
    loader, evaluation = loader_of(module, data), Evaluation(module, held_out(module, data, validation), place)
    course = Course(steps, target, evaluation, clock.tick)
    ask = Ask(module, loader, course, tuple(rates), seeds, run_steps or steps, profile, network, per_node, clip, place)
    chosen = METHODS if methods is None else _asked(methods)
    # All methods on one number of workers before the next: if time ends, what is there can be compared.
    jobs: list[Job] = [(count, method) for count in sorted(set(workers)) for method in chosen]
    refused: dict[str, str] = {}
    ask = replace(ask, stacked=_stacked(ask, workers, stacked, say))
    probed = _each(jobs, lambda job: _probed(ask, job), clock, refused)
    ask = _fitted(ask, sum(probed.values()), clock, say)
    left = {job: seconds * ask.updates for job, seconds in probed.items()}

    def rehearsed(job: Job) -> Reached:
        place = len(probed) - len(left) + 1
        say(f"{place} of {len(probed)}: {_name(job)}, {clock.left(sum(left.values())) / 60:.1f} minutes are left")
        found = clock.counted(left.pop(job), lambda: _rehearsed(ask, job))
        say(f"  {said(found)}")
        return found

    rows = _each(list(probed), rehearsed, clock, refused)
    return Answer(target, ask.course.steps, ordered(list(rows.values())), refused)


def _each(
    jobs: Sequence[Job], call: Callable[[Job], Result], clock: Clock, refused: dict[str, str]
) -> dict[Job, Result]:
    """Of those that end well; why the others don't joins `refused`."""
    found = {}
    for job in jobs:
        try:
            found[job] = call(job)
        except OutOfTime:
            refused[_name(job)] = f"the {clock.minutes:g} minutes were over"
        except (ValueError, FloatingPointError) as error:
            refused[_name(job)] = str(error)
        except torch.OutOfMemoryError:
            refused[_name(job)] = "the device's memory doesn't hold them: take fewer workers, or smaller batches"
    return found


def _name(job: Job) -> str:
    return f"{job[1].title} on {job[0]} workers"


def _stacked(ask: Ask, workers: Sequence[int], asked: bool | None, say: Callable[[str], None]) -> frozenset[int]:
    """Numbers of workers whose gradients are computed at once."""
    found = set()
    for count in sorted(set(workers)) if asked is not False else ():
        ratio, why = tried(ask.module, ask.loader, count, Loop(run_steps=ask.run_steps, device=ask.device))
        if ratio is None:
            say(f"{count} workers are computed one after the other: {why}")
        elif asked or ratio < PAYS:
            found.add(count)
            say(f"{count} workers are computed at once, in {ratio:.2f} of the time of one after the other")
    return frozenset(found)


def _crew(ask: Ask, job: Job, seed: int, rate: float) -> Crew:
    workers, method = job
    batches, epoch = shared_out(ask.loader, workers, seed)
    loop = Loop(ask.clip, rate, epoch, ask.run_steps, seed, ask.device)
    strategy, steps = strategy_of(method.words), ask.run_steps
    stacked = workers in ask.stacked
    return Crew(ask.module, batches, strategy, workers, steps, per_node=ask.per_node, loop=loop, stacked=stacked)


def _probed(ask: Ask, job: Job) -> float:
    """Seconds of a step, with its part of a validation; it also meets what would refuse the method."""
    _step_seconds(ask, job)
    with _crew(ask, job, 0, 1.0) as crew:
        for steps in (WARM, PROBE):
            ask.course.tick()
            begun = monotonic()
            crew.train(steps)
        trained = monotonic()
        ask.course.evaluation.loss([worker.module for worker in crew.workers])
        return (trained - begun) / PROBE + (monotonic() - trained) / ask.course.every


def _rehearsed(ask: Ask, job: Job) -> Reached:
    first = search(partial(_crew, ask, job, 0), ask.rates, ask.course)
    others = (search(partial(_crew, ask, job, seed), [first.rate], ask.course) for seed in range(1, ask.seeds))
    found = [first, *others]
    loss = sum(one.loss for one in found) / len(found)
    (workers, method), seeds = job, tuple(one.steps for one in found)
    foreseen = tuple(one.foreseen(ask.course.target) for one in found)
    return Reached(
        title=method.title,
        words=method.words,
        workers=workers,
        rate=first.rate,
        seeds=tuple(a or b for a, b in zip(seeds, foreseen, strict=True)),
        loss=loss,
        step_seconds=_step_seconds(ask, job),
        step_bytes=first.sent_bytes,
        curve=first.points,
        extrapolated=any(foreseen),
        step_seconds_at=_step_seconds_at(ask, job),
        noise=first.noise,
        apart=sum(one.apart for one in found) / len(found),
    )


def _step_seconds(ask: Ask, job: Job) -> float | None:
    if ask.profile is None:
        return None
    cost, where = _costs(ask, job)
    return forecast(cost, where, drawn(ask.profile.variation, job[0])).seconds


def _step_seconds_at(ask: Ask, job: Job) -> dict[float, float]:
    """By bytes per second of a network card, at the latency that is there; nothing where nobody knows one."""
    if ask.profile is None:
        return {}
    cost, where = _costs(ask, job)
    if not where.network.knows("between"):
        return {}
    latency = where.network.price("exchange", "between", 2).latency_seconds
    links = {rate: where.network.linked("between", latency, rate) for rate in CARDS}
    factors = drawn(ask.profile.variation, job[0], RUNS)
    return {r: float(cost.seconds(replace(where, network=link), factors).mean()) for r, link in links.items()}


def _costs(ask: Ask, job: Job) -> tuple[Method, Setting]:
    assert ask.profile is not None
    where = Setting(ask.profile.model, ask.network or Network(ask.profile.network), Cluster(job[0], ask.per_node))
    return method_of(strategy_of(job[1].words), where.cluster, 1), where


def _fitted(ask: Ask, step_seconds: float, clock: Clock, say: Callable[[str], None]) -> Ask:
    """With as many steps as the minutes allow, if a step of all methods takes so long; schedules stay."""
    asked, seconds = ask.course.steps, step_seconds * ask.updates
    fitting = max(FEWEST, int(asked * min(1.0, clock.rest * MARGIN / seconds))) if seconds else asked
    shorter = "" if fitting >= asked else f" ({asked} would take {seconds / 60:.1f})"
    expected = min(seconds, clock.rest) / 60
    say(f"{min(asked, fitting)} steps, about {expected:.1f} minutes, at most {clock.minutes:g}{shorter}")
    return replace(ask, course=replace(ask.course, steps=min(asked, fitting)))


def _asked(methods: Sequence[str]) -> tuple[Candidate, ...]:
    known = {one.words: one for one in METHODS}
    found = [known.get(words, Candidate(words, words.replace("strategy=", "", 1))) for words in methods]
    for one in found:  # a mistake in words is the user's to mend, not a row that is refused
        strategy_of(one.words)
    return tuple(dict.fromkeys([METHODS[0], *found]))


def _device(name: str) -> torch.device:
    if name not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {name}: CUDA_VISIBLE_DEVICES chooses among several")
    if name == "cuda" and not cuda.device_count():
        raise ValueError("device=cuda, and there is no CUDA device here: leave device out")
    return torch.device(name, 0) if name == "cuda" else CPU


def _check(workers: Sequence[int], steps: int, rates: Sequence[float], seeds: int, minutes: float) -> None:
    if not workers or min(workers) < 2:
        raise ValueError(f"workers must be two or more, got {list(workers)}: give 4, or 4,8")
    if steps < FEWEST:
        raise ValueError(f"steps must be at least {FEWEST}, got {steps}: losses of fewer say nothing")
    if not rates or min(rates) <= 0 or minutes <= 0 or seeds < 1:
        raise ValueError(f"rates {list(rates)}, seeds {seeds} and minutes {minutes} must be positive")
