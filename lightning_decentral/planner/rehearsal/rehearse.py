"""`rehearse`: a module trained as n workers on this machine under several methods: how soon each reaches a loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader

from lightning_decentral.planner.candidates import BASELINE, OUTER, STREAM, Candidate
from lightning_decentral.planner.forecasts import method_of, strategy_of
from lightning_decentral.planner.rehearsal.answer import Answer, Reached, ordered
from lightning_decentral.planner.rehearsal.batches import loader_of, shared_out
from lightning_decentral.planner.rehearsal.crew import Crew
from lightning_decentral.planner.rehearsal.search import WINDOW, search, updates
from lightning_decentral.planner.rehearsal.worker import Loop
from lightning_decentral.shared.plan.forecast import Cluster, Setting, drawn, forecast
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


class OutOfTime(Exception):
    """The minutes are over."""


@dataclass(frozen=True)
class Ask:
    """What all methods are rehearsed alike with; arguments as of `rehearse`."""

    module: LightningModule
    loader: DataLoader[Any]
    target: float
    steps: int
    rates: tuple[float, ...]
    profile: Profile | None
    network: Network | None
    run_steps: int | None
    per_node: int
    clip: float | None
    tick: Callable[[], None]


def rehearse(
    module: LightningModule,
    data: LightningDataModule | DataLoader[Any] | None = None,
    *,
    workers: Sequence[int],
    target: float,
    methods: Sequence[str] | None = None,
    steps: int = 300,
    rates: Sequence[float] = RATES,
    run_steps: int | None = None,
    profile: Profile | None = None,
    network: Network | None = None,
    per_node: int = 1,
    clip: float | None = None,
    minutes: float = 10.0,
    say: Callable[[str], None] = lambda text: None,
) -> Answer:
    """Train copies of a module, which stays as it is, as so many workers on this CPU under each method.

    Each worker gets the batches that Lightning would serve it. No callbacks, hooks, validation or accumulation of
    gradients; the losses are those of training, each worker's own.

    Args:
        target: training loss, mean of the workers and of the last 10 steps.
        methods: words of the command line, as `strategy=gossip strategy/topology=ring`; ddp joins them.
        rates: what the module's learning rates are multiplied by; every method gets the same, by successive halving.
        run_steps: of the training that schedules are made for; as many as are rehearsed.
        profile: gives the seconds of a step.
        network: that they are forecast on; the profile's.
        clip: the Trainer's `gradient_clip_val`.
        minutes: it takes at most: fewer steps where they wouldn't do, and methods that get no turn are said.
        say: hears how long it will take, and how far it is.

    Raises:
        ValueError: the module can't be rehearsed, or an argument is wrong.
    """
    _check(workers, steps, rates, minutes)
    begun, loader = monotonic(), loader_of(module, data)
    chosen = METHODS if methods is None else _asked(methods)

    def tick() -> None:
        if monotonic() - begun > 60 * minutes:
            raise OutOfTime

    ask = Ask(module, loader, target, steps, tuple(rates), profile, network, run_steps, per_node, clip, tick)
    ask = _fitted(ask, len(chosen) * sum(workers), minutes, say)
    rows, refused = [], {}
    # All methods on one number of workers before the next: if time ends, what is there can be compared.
    for number, (count, method) in enumerate((n, m) for n in sorted(set(workers)) for m in chosen):
        name = f"{method.title} on {count} workers"
        say(f"{number + 1} of {len(set(workers)) * len(chosen)}: {name}")
        try:
            rows.append(_rehearsed(ask, method, count))
        except OutOfTime:
            refused[name] = f"the {minutes:g} minutes were over"
        except ValueError as error:
            refused[name] = str(error)
    return Answer(target, ask.steps, ordered(rows), refused)


def _rehearsed(ask: Ask, method: Candidate, workers: int) -> Reached:
    strategy, (batches, epoch) = strategy_of(method.words), shared_out(ask.loader, workers)
    # First what may be refused: it takes no time.
    seconds = _step_seconds(ask, method, workers)

    def make(rate: float) -> Crew:
        loop = Loop(ask.clip, rate, epoch, ask.run_steps or ask.steps)
        return Crew(ask.module, batches, strategy, workers, ask.steps, per_node=ask.per_node, loop=loop)

    found = search(make, ask.rates, ask.steps, ask.target, ask.tick)
    loss = sum(found.losses[-WINDOW:]) / len(found.losses[-WINDOW:])
    return Reached(method.title, method.words, workers, found.rate, found.steps, loss, seconds, found.sent_bytes)


def _step_seconds(ask: Ask, method: Candidate, workers: int) -> float | None:
    if ask.profile is None:
        return None
    network = ask.network or Network(ask.profile.network)
    where = Setting(ask.profile.model, network, Cluster(workers, ask.per_node))
    cost = method_of(strategy_of(method.words), where.cluster, 1)
    return forecast(cost, where, drawn(ask.profile.variation, workers)).seconds


def _fitted(ask: Ask, updates_each: int, minutes: float, say: Callable[[str], None]) -> Ask:
    """With as many steps as the minutes allow, by the seconds of a few updates."""
    batches, _ = shared_out(ask.loader, 1)
    with Crew(ask.module, batches, strategy_of(BASELINE), 1, 4, loop=Loop(run_steps=ask.steps)) as crew:
        crew.train(1)
        begun = monotonic()
        crew.train(3)
        each = (monotonic() - begun) / 3
    seconds = each * updates_each * updates(len(ask.rates), ask.steps)
    fitting = max(WINDOW, int(ask.steps * min(1.0, 60 * minutes / seconds)))
    shorter = "" if fitting == ask.steps else f" ({ask.steps} would take {seconds / 60:.1f})"
    expected = min(seconds, 60 * minutes) / 60
    say(f"{fitting} steps, about {expected:.1f} minutes, at most {minutes:g}{shorter}")
    return replace(ask, steps=fitting)


def _asked(methods: Sequence[str]) -> tuple[Candidate, ...]:
    known = {one.words: one for one in METHODS}
    found = [known.get(words, Candidate(words, words.replace("strategy=", "", 1))) for words in methods]
    for one in found:  # a mistake in words is the user's to mend, not a row that is refused
        strategy_of(one.words)
    return tuple(dict.fromkeys([METHODS[0], *found]))


def _check(workers: Sequence[int], steps: int, rates: Sequence[float], minutes: float) -> None:
    if not workers or min(workers) < 2:
        raise ValueError(f"workers must be two or more, got {list(workers)}: give 4, or 4,8")
    if steps < WINDOW:
        raise ValueError(f"steps must be at least {WINDOW}, which a loss is the mean of, got {steps}")
    if not rates or min(rates) <= 0 or minutes <= 0:
        raise ValueError(f"rates {list(rates)} and minutes {minutes} must be positive")
