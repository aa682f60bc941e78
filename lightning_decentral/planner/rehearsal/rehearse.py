"""`rehearse`: a module trained as n workers on this machine under several methods: how fast each reaches a loss."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from math import ceil, inf
from time import monotonic
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader

from lightning_decentral.planner.candidates import Candidate
from lightning_decentral.planner.forecasts import strategy_of
from lightning_decentral.planner.rehearsal.answer import Answer, Reached, result_text
from lightning_decentral.planner.rehearsal.evaluation import HeldOutEvaluation, held_out
from lightning_decentral.planner.rehearsal.jobs import Ask, Foreknowledge, RehearsalJob, rehearsed, threads_ratio, timed
from lightning_decentral.planner.rehearsal.loop_settings import LoopSettings
from lightning_decentral.planner.rehearsal.methods import METHODS
from lightning_decentral.planner.rehearsal.search import OutOfTime, SearchCourse
from lightning_decentral.planner.rehearsal.turns import CPU
from lightning_decentral.planner.rehearsal.worker import data_of
from lightning_decentral.shared.compute import cuda
from lightning_decentral.shared.plan.data_parallel import DataParallel
from lightning_decentral.shared.plan.forecast import Cluster, Setting
from lightning_decentral.shared.plan.network import Network
from lightning_decentral.shared.plan.profile import Profile

RATES = (0.5, 1.0, 2.0)
FEWEST = 10  # Steps of a rehearsal.
MARGIN = 0.9  # Share of the time left that steps are planned for.
TIMING = 1 / 3  # Share of the minutes after which no further method's steps are timed.
PAYS = 0.9  # Threads are used if a step takes less than this share of the time of one worker after the other.
Result = TypeVar("Result")


def rehearse(
    module: LightningModule,
    data: LightningDataModule | DataLoader[Any] | None = None,
    *,
    workers: Sequence[int],
    target: float,
    methods: Sequence[str | Candidate] | None = None,
    modules: Mapping[str, LightningModule] | None = None,
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
    begun: float | None = None,
    threads: int | None = None,
    device: str = "cpu",
    say: Callable[[str], None] = lambda text: None,
) -> Answer:
    """Train copies of a module, which doesn't change, as n workers on one device under each method.

    Each worker is a Trainer, with the module's hooks. The run's own callbacks and accumulation are left out.

    Args:
        target: validation loss of the mean of the workers' models: of `training_step`, on the first batches.
        methods: overrides of the command line, as `strategy=gossip strategy/topology=ring`; ddp is added.
        modules: modules with an optimizer of their own, by overrides of methods.
        rates: factors of the module's learning rates, the same for every method, chosen by successive halving.
        seeds: number of seeds for batch order and random numbers, at the best rate; initial values are the module's.
        validation: loader used instead of the datamodule's or the module's own.
        run_steps: steps of the real training, for schedules; by default `steps`.
        profile: profile with the computation seconds of a step.
        network: network to forecast steps on; by default the profile's.
        clip: the Trainer's `gradient_clip_val`.
        minutes: most minutes of the rehearsal, with fewer steps if necessary. Each method gets a share of the rest.
        begun: time.monotonic() when the minutes began; by default now.
        threads: most workers whose gradients are computed at the same time, if that is faster and no step draws random
            numbers; None: torch's number of threads, which they share. On a GPU it is one.
        device: "cpu", or "cuda" for the first device that is visible.
        say: called with lines on the expected time and on the progress.

    Raises:
        ValueError: the module can't be rehearsed, there is nothing to validate by, or an argument is wrong.
    """
    _refuse(workers, steps, run_steps, rates, seeds, minutes, threads, device)
    refuse_unpriced(workers, profile, network, per_node)
    clock, place = Clock(minutes, begun), torch.device(device, 0) if device == "cuda" else CPU
    most = (threads or torch.get_num_threads()) if place == CPU else 1
    given = data_of(data)
    evaluation = HeldOutEvaluation(module, held_out(module, given, validation), place, most)
    if left_out := [name for name in dir(LightningModule) if "on_validation" in name and is_overridden(name, module)]:
        say(f"not called, as a rehearsal validates by training_step: {', '.join(left_out)} of {type(module).__name__}")
    course = SearchCourse(steps, target, evaluation, clock.tick)
    ask = Ask(
        module, given, course, tuple(rates), seeds, run_steps or steps, profile, network, per_node, clip, place,
        modules=modules or {},
    )  # fmt: skip
    known = {one.overrides: one for one in METHODS}
    named = {own: Candidate(own, own.replace("strategy=", "", 1)) for own in methods or () if isinstance(own, str)}
    asked = [known.get(own, named[own]) if isinstance(own, str) else own for own in methods or ()]
    for one in asked:  # a mistake in the user's overrides raises an error, and makes no refused row
        strategy_of(one.overrides)
    chosen = METHODS if methods is None else tuple(dict.fromkeys([METHODS[0], *asked]))
    # All methods on one number of workers before the next: if time runs out, the finished results are comparable.
    jobs = [RehearsalJob(count, method) for count in sorted(set(workers)) for method in chosen]
    return RehearsalRun(_on_threads(ask, workers, most, say), clock, say).of(jobs)


class Clock:
    """Clock of the rehearsal's minutes, which begin when it is made, or began at `begun`."""

    def __init__(self, minutes: float, begun: float | None = None) -> None:
        self.minutes, self._begun = minutes, monotonic() if begun is None else begun
        self._expected, self._taken = 0.0, 0.0
        self._turn, self._ticked = inf, monotonic()

    @property
    def rest(self) -> float:
        """Seconds until the minutes are over."""
        return max(0.0, self._begun + 60 * self.minutes - monotonic())

    def tick(self) -> None:
        """Raise OutOfTime if the minutes, or this turn, leave less time than has passed since the last call."""
        now = monotonic()
        last, self._ticked = now - self._ticked, now
        if not last < self.rest or now + last > self._turn:
            raise OutOfTime

    def turn(self, share: float) -> None:
        """Begin a turn (the time of one job), which has this share of the remaining time."""
        self._ticked = monotonic()
        self._turn = self._ticked + share * self.rest

    def counted(self, expected: float, call: Callable[[], Result]) -> Result:
        """Run the call and return its result; its seconds correct later calls' expected seconds, each half as much."""
        begun, found = monotonic(), call()
        self._expected, self._taken = self._expected / 2 + expected, self._taken / 2 + monotonic() - begun
        return found

    def takes(self, expected: float) -> float:
        """Seconds that the expected work takes, at the pace so far."""
        return expected * (self._taken / self._expected if self._expected else 1.0)


class RehearsalRun:
    """Run of jobs one after the other, within the minutes."""

    def __init__(self, ask: Ask, clock: Clock, say: Callable[[str], None]) -> None:
        self._ask, self._clock, self._say = ask, clock, say
        self._refused: dict[str, str] = {}
        self._known: Foreknowledge | None = None
        self._worker_seconds: float | None = None  # seconds of the last timed step, for each of its workers

    def of(self, jobs: Sequence[RehearsalJob]) -> Answer:
        self._say(f"{len(jobs)} trainings: a few steps of each are timed first")
        seconds = self._each(jobs, self._step_seconds)
        self._ask = _fitted(self._ask, seconds, self._clock, self._say)
        left = {job: each * self._ask.updates for job, each in seconds.items()}
        rows = self._each(list(left), lambda job: self._one(job, left, len(seconds)))
        # The shortest time to the target first; by steps where no seconds are known, by loss where it wasn't reached.
        order = sorted(rows.values(), key=lambda row: (row.seconds or inf, row.steps or inf, row.loss))
        return Answer(self._ask.course.target, self._ask.course.steps, tuple(order), self._refused)

    def _step_seconds(self, job: RehearsalJob) -> float:
        """Seconds of a step, as for the last timed method if timing has used its share of the minutes."""
        if self._worker_seconds is None or self._clock.rest > (1 - TIMING) * 60 * self._clock.minutes:
            self._worker_seconds = timed(self._ask, job) / job.workers
        return self._worker_seconds * job.workers

    def _one(self, job: RehearsalJob, left: dict[RehearsalJob, float], count: int) -> Reached:
        """Rehearse one job, and remove it from the jobs left."""
        minutes = min(self._clock.rest, self._clock.takes(sum(left.values()))) / 60
        self._say(f"{count - len(left) + 1} of {count}: {job.name}, {minutes:.1f} minutes are left")
        # Steps are planned anew for each method, by the time that earlier ones took: none takes time of later ones.
        whole, known, course = sum(left.values()), self._known, self._ask.course
        course = replace(course, steps=_fitting(course.steps, self._clock.takes(whole), self._clock))
        self._clock.turn(left[job] / whole if whole else 1.0)
        rates = self._ask.rates if known is None else known.rates(self._ask, job)  # rates worth trying
        if len(rates) < len(self._ask.rates):
            self._say(
                f"  predicted: its workers' disagreement costs nothing, so learning rates times {rates[0]:g} only"
            )
        ask = replace(self._ask, rates=rates, course=course)
        expected = left.pop(job) * ask.updates / self._ask.updates
        found, learnt = self._clock.counted(expected, partial(rehearsed, ask, job, known))
        found = replace(found, given_rate=len(rates) < len(self._ask.rates))
        self._say(f"  {result_text(found)}")
        if found.cut(self._ask.course.steps, course.target):
            planned = found.trained == course.steps
            why = " were planned in the minutes left" if planned else ": its share of the minutes was over"
            self._say(f"  {found.trained} of {self._ask.course.steps} steps{why}")
        if learnt is not None and learnt is not known:  # measurements for later methods
            costs = {one.name: learnt.at_most(self._ask, one) for one in left}
            predicted = ", ".join(f"{name} {cost:.4f}" for name, cost in costs.items() if cost is not None)
            if predicted:
                self._say(f"  predicted: excess loss of workers' own models over their mean at most {predicted}")
        self._known = learnt
        return found

    def _each(self, jobs: Sequence[RehearsalJob], call: Callable[[RehearsalJob], Result]) -> dict[RehearsalJob, Result]:
        """Results of the jobs that succeed; the errors of the others are added to the refused jobs."""
        found = {}
        for job in jobs:
            try:
                found[job] = call(job)
            except OutOfTime:
                share, verb = ("its share of ", "was") if self._clock.rest else ("", "were")
                self._refused[job.name] = f"{share}the {self._clock.minutes:g} minutes {verb} over: give more minutes"
            except (ValueError, FloatingPointError) as error:
                self._refused[job.name] = str(error)
            except torch.OutOfMemoryError:
                remedy = "take fewer workers, or smaller batches"
                self._refused[job.name] = f"the device's memory doesn't hold them: {remedy}"
        return found


def _on_threads(ask: Ask, workers: Sequence[int], most: int, say: Callable[[str], None]) -> Ask:
    """Return the settings with threads, for each number of workers where they are faster."""
    threads = dict(ask.threads)
    for count in sorted(set(workers)):
        loop, some = LoopSettings(run_steps=ask.run_steps, device=ask.device), min(count, most)
        ratio = threads_ratio(ask.module, ask.data, count, loop, some) if some > 1 else None
        if ratio is not None and ratio < PAYS:
            threads[count] = some
            say(f"{count} workers are computed {some} at a time, in {ratio:.2f} of the time of one after the other")
    return replace(ask, threads=threads)


def _fitted(ask: Ask, step_seconds: Mapping[RehearsalJob, float], clock: Clock, say: Callable[[str], None]) -> Ask:
    """Return the settings with as many steps as the minutes allow, by methods' seconds of a step; schedules stay."""
    asked, seconds = ask.course.steps, sum(step_seconds.values()) * ask.updates
    if not step_seconds:  # no method can be rehearsed
        return ask
    fitting = _fitting(asked, seconds, clock)
    shorter = "" if fitting >= asked else f" ({asked} would take {seconds / 60:.1f})"
    expected = min(seconds, clock.rest) / 60
    say(f"{fitting} steps, about {expected:.1f} minutes, at most {clock.minutes:g}{shorter}")
    if fitting < asked:
        fit = ", ".join(_would_fit(step_seconds, clock.rest * MARGIN / ask.updates))
        minutes = ceil(clock.minutes - clock.rest / 60 + seconds / 60 / MARGIN)
        say(f"a target that needs more than {fitting} steps can't be reached in {clock.minutes:g} minutes; would fit: "
            f"minutes={minutes}{', or ' * bool(fit)}{fit}")  # fmt: skip
    if fitting == FEWEST and seconds * FEWEST / asked > clock.rest * MARGIN:
        say(f"not even {FEWEST} steps of each fit: each method ends with its share of the minutes")
    return replace(ask, course=replace(ask.course, steps=fitting))


def _would_fit(step_seconds: Mapping[RehearsalJob, float], most: float) -> Iterator[str]:
    """Yield texts that name subsets of the jobs which take at most so many seconds a step."""
    counts = sorted({job.workers for job in step_seconds})
    of = {count: [each for job, each in step_seconds.items() if job.workers == count] for count in counts}
    if (some := sum(whole <= most for whole in accumulate(step_seconds.values()))) > 1:
        yield f"{some} of the {len(step_seconds)} {'trainings' if len(counts) > 1 else 'methods'}"
    if fewer := sum(whole <= most for whole in accumulate(map(sum, of.values()))):
        yield f"workers={','.join(map(str, counts[:fewer]))}"
    elif (about := int(counts[0] * most / sum(of[counts[0]]))) > 1:
        yield f"about {about} workers"


def _fitting(steps: int, seconds: float, clock: Clock) -> int:
    """Number of steps that there is time for, if all `steps` would take so many seconds; at least `FEWEST`."""
    return max(FEWEST, int(steps * min(1.0, clock.rest * MARGIN / seconds))) if seconds else steps


def refuse_unpriced(workers: Sequence[int], profile: Profile | None, network: Network | None, per_node: int) -> None:
    """Raise ValueError for a profile without a network, by which the seconds of a step can't be predicted."""
    for count in workers if profile is not None else ():
        assert profile is not None
        where = Setting(profile.model, network or Network(profile.network), Cluster(count, per_node))
        DataParallel().prices(where)


def _refuse(
    workers: Sequence[int], steps: int, run_steps: int | None, rates: Sequence[float], seeds: int, minutes: float,
    threads: int | None, device: str,
) -> None:  # fmt: skip
    if not workers or min(workers) < 2:
        raise ValueError(f"workers must be two or more, got {list(workers)}: give 4, or 4,8")
    if steps < FEWEST:
        raise ValueError(f"steps must be at least {FEWEST}, got {steps}: losses of fewer show nothing")
    if not rates or min(rates) <= 0 or minutes <= 0 or seeds < 1:
        raise ValueError(f"rates {list(rates)}, seeds {seeds} and minutes {minutes} must be positive")
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be 1 or more, got {threads}: leave it out for as many as torch uses")
    if run_steps is not None and run_steps < steps:
        raise ValueError(f"run_steps={run_steps} of which {steps} can't be rehearsed: give as many steps, or fewer")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {device}: CUDA_VISIBLE_DEVICES chooses among several")
    if device == "cuda" and not cuda.device_count():
        raise ValueError("device=cuda, and there is no CUDA device here: leave device out")
