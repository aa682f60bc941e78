"""Compares the forecasts of all candidates, and recommends one to train with, also for a grid of other clusters."""

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from operator import itemgetter

from lightning_decentral.planner.candidates import BASELINE, Candidate, candidates, in_full, is_ddp, measured
from lightning_decentral.planner.forecasts import composed, method_of
from lightning_decentral.planner.plan.optimizer_cost import trained_with
from lightning_decentral.shared.plan.data_parallel import Accumulated
from lightning_decentral.shared.plan.forecast import Cluster, Method, Setting, StepForecast, drawn, forecast
from lightning_decentral.shared.plan.known_losses import BASELINE as DDP
from lightning_decentral.shared.plan.known_losses import KnownLosses, kind_of, nearest
from lightning_decentral.shared.plan.profile import Model

THRESHOLD = 0.1
AS_FAST = 0.02
AS_SOON = 0.1
"""Relative error of forecasts: of methods whose seconds differ by less, the one that sends fewest bytes is chosen."""
NODES = (2, 4, 8, 16)
RATES = (1.25e7, 1.25e8, 1.25e9, 3.125e9, 1.25e10, 5e10)  # 100 Mbit/s ... 400 Gbit/s
MOST_WORKERS = 128
RUNS = 2
NOTHING = "nothing fits"
BASES = {"adam": DDP, "adamw": DDP, "accum_adamw": "ddp, AccumAdamW", "muon": "ddp, Muon"}
"""{optimizer: name of `ddp` with this optimizer in the table of known losses}"""


@dataclass(frozen=True)
class ComparedMethod:
    """A candidate with its forecast."""

    candidate: Candidate
    method: Method
    forecast: StepForecast
    setting: Setting  # setting with the candidate's own optimizer
    # Batches to the final loss of `ddp` with AdamW, divided by its own batches; inf: not reached in as many batches;
    # None: not measured.
    share: float | None = None

    @property
    def to_loss(self) -> float:
        """Seconds to the baseline's final loss per batch of the baseline; inf if not reached, or not measured."""
        return inf if self.share is None else self.share * self.forecast.seconds


@dataclass(frozen=True)
class Comparison:
    """Comparison of methods in a setting; fields without a comment are the arguments of `plan` with these names."""

    setting: Setting
    rows: tuple[ComparedMethod, ...]  # with measured losses, the fastest to the loss first; then the fastest steps
    refused: dict[str, str]  # {title of a candidate that can't serve the cluster: why}
    best: ComparedMethod | None  # method to train with; None if no method fits into the memory
    variation: Sequence[float] = ()
    slices: int = 1
    also: tuple[str, ...] = ()
    memory_bytes: float = inf
    threshold: float = THRESHOLD
    like: str | None = None
    profiled: Model | None = None  # with the profile's optimizer, from which candidates' are priced

    @property
    def known(self) -> KnownLosses | None:
        """Losses of the nearest measured setting; None if no model of this kind was measured."""
        return losses_of(self.setting, self.like)

    @property
    def stay(self) -> bool:
        """Return whether a form of ddp is the best, because no other method gains enough."""
        return self.best is not None and is_ddp(self.best.candidate.overrides)

    @property
    def fastest_ddp(self) -> ComparedMethod:
        """Form of `ddp` that is the fastest to the loss, or has the fastest step if no losses were measured."""
        forms = [row for row in self.rows if is_ddp(row.candidate.overrides) and self.fits(row)]
        return min(forms, key=lambda row: (row.to_loss, row.forecast.seconds), default=self.baseline)

    @property
    def baseline(self) -> ComparedMethod:
        return next(row for row in self.rows if row.candidate.overrides == BASELINE)

    def speedup(self, row: ComparedMethod) -> float:
        """Speed-up of a method over ddp, by seconds per step."""
        return self.baseline.forecast.seconds / row.forecast.seconds

    def fits(self, row: ComparedMethod) -> bool:
        """Return whether a method fits into a device's memory."""
        return row.forecast.memory_bytes <= self.memory_bytes

    @property
    def command(self) -> str:
        """Overrides of `recipes/train.py` that train with the best method, for a shell: the profile's, then strategy,
        codec, rule and optimizer by name, and the cluster."""
        model, cluster = self.setting.model, self.setting.cluster
        overrides = in_full(self.best.candidate.overrides) if self.best else []
        own = self.best is not None and bool(composed(self.best.candidate.overrides).optimizer)
        kept = [one for one in model.words if not (own and one.lstrip("+~").startswith("optimizer"))]
        unnamed = model.optimizer and not own and not any(one.startswith("optimizer=") for one in kept)
        optimizer = [f"optimizer={model.optimizer}"] if unnamed else []
        where = [f"trainer.num_nodes={cluster.nodes}", f"trainer.devices={cluster.per_node}"]
        return shlex.join([*kept, *overrides, *optimizer, *where])


def plan(
    setting: Setting,
    variation: Sequence[float] = (),  # variation of the computation seconds, as in `Profile`
    *,
    slices: int = 1,  # slices of a sequence in a pipeline; 1 for a model without a token axis
    also: Iterable[str] = (),  # overrides of further candidates
    memory_bytes: float = inf,  # memory of a device
    threshold: float = THRESHOLD,  # gain over ddp below which ddp is recommended
    optimizer: str | None = None,  # optimizer of all methods, as in `optimizer=`; by default the profile's
    like: str | None = None,  # kind of the model, a key of `known_losses.RECIPES`; by default the profile's recipe
    say: Callable[[str], None] = lambda text: None,  # called with the title of each candidate before its forecast
) -> Comparison:
    """Compare the forecasts of all candidates in a setting. ValueError: overrides in `also` that can't be composed;
    nothing measured between nodes; an optimizer whose cost the profile doesn't give."""
    profiled = setting.model
    if optimizer is not None:
        setting = replace(setting, model=trained_with(profiled, optimizer))
    factors = drawn(variation, setting.cluster.simulated.workers)
    asked, known = tuple(also), losses_of(setting, like)
    for overrides in asked:  # a mistake in the user's overrides raises an error, and makes no refused row
        composed(overrides)
    rows, refused = [], {}
    for candidate, method, where in _methods(setting, profiled, slices, asked, known, say):
        if isinstance(method, str):
            refused[candidate.title] = method
        else:
            share = share_of(candidate, where.model.optimizer, known)
            rows.append(ComparedMethod(candidate, method, forecast(method, where, factors), where, share))
    usable = [row for row in rows if row.method.equal and row.forecast.memory_bytes <= memory_bytes]
    choice = _best([(r.candidate, r.forecast.seconds, r.share, r.forecast.card_bytes) for r in usable], threshold)
    best = next((row for row in usable if row.candidate is choice), None)
    order = tuple(sorted(rows, key=lambda row: (row.to_loss, row.forecast.seconds)))
    return Comparison(setting, order, refused, best, variation, slices, asked, memory_bytes, threshold, like, profiled)


def losses_of(setting: Setting, like: str | None = None) -> KnownLosses | None:
    """Measured losses of the setting nearest to this one, with the same optimizers; None if there are none."""
    kind, model = like or kind_of(setting.model.words), setting.model
    if kind is None or model.optimizer not in BASES:
        return None
    return nearest(kind, setting.cluster.workers, model.batch, model.parameter_bytes)


def share_of(candidate: Candidate, optimizer: str, known: KnownLosses | None) -> float | None:
    """`ComparedMethod.share` of a candidate whose overrides are a measured method's, or plain `ddp`'s; else None."""
    if known is None:
        return None
    chosen = set(candidate.overrides.split())
    same = (method for method, overrides in known.overrides.items() if set(overrides.split()) == chosen)
    method = BASES.get(optimizer) if candidate.overrides == BASELINE else next(same, None)
    if method is None or method not in known.batches:
        return None
    found = known.share(method)
    return inf if found is None else found


def _best(rows: Sequence[tuple[Candidate, float, float | None, float]], threshold: float) -> Candidate | None:
    """Choose a candidate by seconds to the loss among those with a known share; else by seconds of a step. `rows`:
    (candidate, seconds of a step, `ComparedMethod.share`, bytes that it sends)."""
    reaching = sorted((row for row in rows if row[2] not in (None, inf)), key=itemgetter(3))
    if reaching:
        to_loss = [(one, seconds * (share or inf)) for one, seconds, share, _ in reaching]
        return chosen(to_loss, threshold, AS_SOON, forms=is_ddp)
    unknown = [(one, seconds) for one, seconds, share, _ in rows if share is None or one.overrides == BASELINE]
    return chosen(unknown, threshold)


def chosen(
    found: Sequence[tuple[Candidate, float]],
    threshold: float,
    alike: float = AS_FAST,  # share of the seconds up to which candidates are equally fast
    forms: Callable[[str], bool] = BASELINE.__eq__,  # a form of ddp? The fastest of them counts as ddp
) -> Candidate | None:
    """Choose by seconds: ddp if no candidate gains enough over ddp; else the first of the fastest that do."""
    ddp, base = min((pair for pair in found if forms(pair[0].overrides)), key=itemgetter(1), default=(None, inf))
    # Two conditions: at a threshold of 0 a method as fast as ddp gains nothing.
    gaining = [(one, seconds) for one, seconds in found if seconds < base and (1 + threshold) * seconds <= base]
    fastest = min((seconds for _, seconds in gaining), default=0.0)
    return next((one for one, seconds in gaining if seconds <= (1 + alike) * fastest), ddp)


@dataclass(frozen=True)
class Cell:
    """Forecasts for one cluster: seconds of the candidates by title, to a loss if known, and the recommended one."""

    workers: int
    bytes_per_second: float
    seconds: dict[str, float]
    best: str

    def speedup(self, title: str) -> float:
        """Speed-up of a candidate over ddp; 0 where one of them has no seconds."""
        return self.seconds["ddp"] / self.seconds[title] if {title, "ddp"} <= self.seconds.keys() else 0.0


def sizes(setting: Setting, nodes: Sequence[int] = NODES) -> list[int]:
    """Numbers of workers, the setting's own among them."""
    per_node = setting.cluster.per_node
    return sorted({setting.cluster.workers, *(n * per_node for n in nodes if n * per_node <= MOST_WORKERS)})


def grid(plan: Comparison, workers: Sequence[int], rates: Sequence[float]) -> list[Cell]:
    """Compare for every number of workers and every bandwidth; the latency doesn't change."""
    setting, found = plan.setting, []
    latency = setting.network.price("exchange", "between", 2).latency_seconds
    for count in workers:
        where = replace(setting, cluster=Cluster(count, setting.cluster.per_node))
        factors = drawn(plan.variation, where.cluster.simulated.workers, RUNS)
        known = losses_of(where, plan.like)
        rows = _methods(where, plan.profiled or setting.model, plan.slices, plan.also, known)
        served = [(one, method, at) for one, method, at in rows if not isinstance(method, str) and method.equal]
        assert any(candidate.overrides == BASELINE for candidate, *_ in served)  # ddp serves every cluster
        fit = [row for row in served if row[1].memory_bytes(row[2].without_network) <= plan.memory_bytes]
        about = [(one, share_of(one, at.model.optimizer, known), method.card_bytes(at)) for one, method, at in fit]
        for rate in rates:
            link = where.network.linked("between", latency, rate)
            seconds = {
                one: float(method.seconds(replace(at, network=link), factors).mean()) for one, method, at in served
            }
            best = _best([(one, seconds[one], share, sent) for one, share, sent in about], plan.threshold)
            to_loss = {one.title: share * seconds[one] for one, share, _ in about if share}
            by_title = to_loss if "ddp" in to_loss else {one.title: spent for one, spent in seconds.items()}
            found.append(Cell(count, rate, by_title, best.title if best else NOTHING))
    return found


def _methods(
    where: Setting,
    profiled: Model,
    slices: int,
    also: Iterable[str],
    known: KnownLosses | None,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[tuple[Candidate, Method | str, Setting]]:
    """Yield each candidate with its method, or why it can't serve the cluster, and the setting with its optimizer."""
    own = BASES.get(where.model.optimizer)  # `ddp` with this optimizer is the row `ddp`
    further = [one for one in (measured(known) if known else ()) if one.title != own]
    asked = (Candidate(one, one) for one in also)
    for candidate in [*candidates(where.cluster, where.model, slices), *further, *asked]:
        say(candidate.title)
        try:
            made = composed(candidate.overrides)
            at = replace(where, model=trained_with(profiled, made.optimizer)) if made.optimizer else where
            method = method_of(made.strategy, at.cluster, slices)
            method = Accumulated(method, made.accumulated) if made.accumulated > 1 else method
            method.memory_bytes(at.without_network)  # raises if the method needs an unmeasured price
            yield candidate, method, at
        except ValueError as error:
            yield candidate, str(error), where
