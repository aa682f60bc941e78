"""Comparison of forecasts: all candidates side by side, which one to train with, and the same for other clusters."""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from lightning_decentral.planner.candidates import BASELINE, Candidate, candidates, in_full
from lightning_decentral.planner.forecasts import method_of, strategy_of
from lightning_decentral.planner.plan.optimizer_cost import trained_with
from lightning_decentral.shared.plan.forecast import Cluster, Method, Setting, StepForecast, drawn, forecast

THRESHOLD = 0.1
AS_FAST = 0.02
NODES = (2, 4, 8, 16)
RATES = (1.25e7, 1.25e8, 1.25e9, 3.125e9, 1.25e10, 5e10)  # 100 Mbit/s ... 400 Gbit/s
MOST_WORKERS = 128
RUNS = 2
NOTHING = "nothing fits"


@dataclass(frozen=True)
class ComparedMethod:
    """A candidate with its forecast."""

    candidate: Candidate
    method: Method
    forecast: StepForecast


@dataclass(frozen=True)
class Comparison:
    """Comparison of methods in a setting.

    Args:
        rows: the fastest first.
        refused: {title of a candidate that can't serve the cluster: why}.
        best: the one to train with; None where nothing fits into the memory.
        others: as of `plan`.
    """

    setting: Setting
    rows: tuple[ComparedMethod, ...]
    refused: dict[str, str]
    best: ComparedMethod | None
    variation: Sequence[float] = ()
    slices: int = 1
    also: tuple[str, ...] = ()
    memory_bytes: float = inf
    threshold: float = THRESHOLD

    @property
    def stay(self) -> bool:
        """Whether ddp is the best because nothing else gains enough."""
        return self.best is not None and self.best.candidate.overrides == BASELINE

    @property
    def baseline(self) -> ComparedMethod:
        return next(row for row in self.rows if row.candidate.overrides == BASELINE)

    def speedup(self, row: ComparedMethod) -> float:
        """Seconds of ddp over the row's."""
        return self.baseline.forecast.seconds / row.forecast.seconds

    def fits(self, row: ComparedMethod) -> bool:
        """Return whether a device's memory holds it."""
        return row.forecast.memory_bytes <= self.memory_bytes

    @property
    def command(self) -> str:
        """Overrides for `recipes/train.py` that train with the best one, for a shell: the profile's, then strategy,
        codec, rule and optimizer by name, and the cluster."""
        model, cluster = self.setting.model, self.setting.cluster
        overrides = in_full(self.best.candidate.overrides) if self.best else []
        unnamed = model.optimizer and not any(one.startswith("optimizer=") for one in model.words)
        optimizer = [f"optimizer={model.optimizer}"] if unnamed else []
        where = [f"trainer.num_nodes={cluster.nodes}", f"trainer.devices={cluster.per_node}"]
        return shlex.join([*model.words, *overrides, *optimizer, *where])


def plan(
    setting: Setting,
    variation: Sequence[float] = (),
    *,
    slices: int = 1,
    also: Iterable[str] = (),
    memory_bytes: float = inf,
    threshold: float = THRESHOLD,
    optimizer: str | None = None,
) -> Comparison:
    """Compare.

    Args:
        variation: of the seconds of computation, as in `Profile`.
        slices: of a sequence in a pipeline; 1 for a model without a token axis.
        also: overrides of further candidates.
        memory_bytes: of a device.
        threshold: gain over ddp below which it recommends ddp.
        optimizer: of all methods, as `optimizer=` names it; the profile's.

    Raises:
        ValueError: overrides in `also` that can't be composed; nothing measured between nodes; an optimizer whose cost
            the profile doesn't give.
    """
    if optimizer is not None:
        setting = replace(setting, model=trained_with(setting.model, optimizer))
    factors = drawn(variation, setting.cluster.workers)
    asked = tuple(also)
    for overrides in asked:  # a mistake in overrides asked for is the user's to mend, not a row that is refused
        strategy_of(overrides)
    rows, refused = [], {}
    for candidate, method in _methods(setting, slices, asked):
        if isinstance(method, str):
            refused[candidate.title] = method
        else:
            rows.append(ComparedMethod(candidate, method, forecast(method, setting, factors)))
    usable = [row for row in rows if row.method.equal and row.forecast.memory_bytes <= memory_bytes]
    choice = chosen([(row.candidate, row.forecast.seconds) for row in usable], threshold)
    best = next((row for row in usable if row.candidate is choice), None)
    order = tuple(sorted(rows, key=lambda row: row.forecast.seconds))
    return Comparison(setting, order, refused, best, variation, slices, asked, memory_bytes, threshold)


def chosen(found: Sequence[tuple[Candidate, float]], threshold: float) -> Candidate | None:
    """Choose by seconds: ddp if nothing gains enough over it; otherwise, of the fastest that do, what mixes most."""
    ddp, base = next((pair for pair in found if pair[0].overrides == BASELINE), (None, inf))
    # Both, as at a threshold of 0 to be as fast is no gain.
    gaining = [(one, seconds) for one, seconds in found if seconds < base and (1 + threshold) * seconds <= base]
    fastest = min((seconds for _, seconds in gaining), default=0.0)
    return next((one for one, seconds in gaining if seconds <= (1 + AS_FAST) * fastest), ddp)


@dataclass(frozen=True)
class Cell:
    """One cluster: seconds of the candidates by title, and the one to train with or `NOTHING`."""

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
    """The same comparison for every number of workers with every rate; the latency stays as it is."""
    setting, found = plan.setting, []
    latency = setting.network.price("exchange", "between", 2).latency_seconds
    for count in workers:
        where = replace(setting, cluster=Cluster(count, setting.cluster.per_node))
        factors = drawn(plan.variation, count, RUNS)
        rows = _methods(where, plan.slices, plan.also)
        served = [(one, method) for one, method in rows if not isinstance(method, str) and method.equal]
        assert any(candidate.overrides == BASELINE for candidate, _ in served)  # ddp serves every cluster
        fit = {one for one, method in served if method.memory_bytes(where.without_network) <= plan.memory_bytes}
        for rate in rates:
            there = replace(where, network=where.network.linked("between", latency, rate))
            seconds = {one: float(method.seconds(there, factors).mean()) for one, method in served}
            best = chosen([(one, spent) for one, spent in seconds.items() if one in fit], plan.threshold)
            by_title = {one.title: spent for one, spent in seconds.items()}
            found.append(Cell(count, rate, by_title, best.title if best else NOTHING))
    return found


def _methods(where: Setting, slices: int, also: Iterable[str]) -> Iterator[tuple[Candidate, Method | str]]:
    """Yield each candidate with its method, or why it can't serve the cluster."""
    for candidate in [*candidates(where.cluster, where.model, slices), *(Candidate(own, own) for own in also)]:
        try:
            method = method_of(strategy_of(candidate.overrides), where.cluster, slices)
            method.memory_bytes(where.without_network)  # where nothing of the network can be missing
            yield candidate, method
        except ValueError as error:
            yield candidate, str(error)
