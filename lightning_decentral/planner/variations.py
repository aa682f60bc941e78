"""Variations of a plan (what if): other clusters, more or fewer workers, faster or slower network cards."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from lightning_decentral.planner.candidates import BASELINE, Candidate, candidates
from lightning_decentral.planner.compare import chosen
from lightning_decentral.planner.forecasts import method_of, strategy_of
from lightning_decentral.shared.plan.forecast import Cluster, Method, Setting, drawn

NODES = (2, 4, 8, 16)
RATES = (1.25e7, 1.25e8, 1.25e9, 3.125e9, 1.25e10, 5e10)  # 100 Mbit/s ... 400 Gbit/s
MOST_WORKERS = 128
RUNS = 2
NOTHING = "nothing fits"

Fitting = tuple[Candidate, Method, bool]
"""Candidate, its method, and whether a device's memory holds it."""


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


def grid(
    setting: Setting,
    variation: Sequence[float],
    workers: Sequence[int],
    rates: Sequence[float],
    threshold: float,
    slices: int = 1,
    also: Sequence[str] = (),
    memory_bytes: float = inf,
) -> list[Cell]:
    """Every number of workers with every rate; the latency stays as it is.

    Args:
        also: overrides of further candidates.
        memory_bytes: of a device; what needs more isn't recommended.
    """
    latency = setting.network.price("exchange", "between", 2).latency_seconds
    return [
        _cell(
            replace(where, network=where.network.linked("between", latency, rate)), variation, fitting, rate, threshold
        )
        for where, fitting in (_at(setting, count, slices, also, memory_bytes) for count in workers)
        for rate in rates
    ]


def _at(
    setting: Setting, workers: int, slices: int, also: Sequence[str], memory_bytes: float
) -> tuple[Setting, list[Fitting]]:
    where = replace(setting, cluster=Cluster(workers, setting.cluster.per_node))
    compared = [*candidates(where.cluster, where.model, slices), *(Candidate(words, words) for words in also)]
    return where, list(_methods(where, slices, compared, memory_bytes))


def _methods(where: Setting, slices: int, compared: Sequence[Candidate], memory_bytes: float) -> Iterator[Fitting]:
    for candidate in compared:
        try:
            method = method_of(strategy_of(candidate.words), where.cluster, slices)
            fits = method.memory_bytes(where.without_network) <= memory_bytes
        except ValueError:
            continue
        if method.equal:
            yield candidate, method, fits


def _cell(
    where: Setting,
    variation: Sequence[float],
    methods: Sequence[Fitting],
    rate: float,
    threshold: float,
) -> Cell:
    factors = drawn(variation, where.cluster.workers, RUNS)
    found = [(candidate, float(method.seconds(where, factors).mean()), fits) for candidate, method, fits in methods]
    assert any(candidate.words == BASELINE for candidate, _, _ in found)  # ddp serves every cluster
    best = chosen([(candidate, seconds) for candidate, seconds, fits in found if fits], threshold)
    by_title = {candidate.title: seconds for candidate, seconds, _ in found}
    return Cell(where.cluster.workers, rate, by_title, best.title if best else NOTHING)
