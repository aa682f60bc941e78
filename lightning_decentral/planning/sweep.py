"""The same comparison on other clusters: more or fewer workers, faster or slower network cards."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_decentral.forecast.method import Cluster, Method, Setting
from lightning_decentral.forecast.stragglers import drawn
from lightning_decentral.planning.candidates import BASELINE, Candidate, candidates, method_of, strategy_of
from lightning_decentral.planning.plan import chosen

NODES = (2, 4, 8, 16)
RATES = (1.25e7, 1.25e8, 1.25e9, 3.125e9, 1.25e10, 5e10)  # 100 Mbit/s ... 400 Gbit/s
MOST_WORKERS = 128
RUNS = 2


@dataclass(frozen=True)
class Cell:
    """One cluster: seconds of the candidates by title, and the one to train with."""

    workers: int
    bytes_per_second: float
    seconds: dict[str, float]
    best: str

    def speedup(self, title: str) -> float:
        """Of a candidate over ddp; 0 where it can't serve the cluster."""
        return self.seconds["ddp"] / self.seconds[title] if title in self.seconds else 0.0


def sizes(setting: Setting, nodes: Sequence[int] = NODES) -> list[int]:
    """Numbers of workers, the setting's own among them."""
    per_node = setting.cluster.per_node
    return sorted({setting.cluster.workers, *(n * per_node for n in nodes if n * per_node <= MOST_WORKERS)})


def cells(
    setting: Setting,
    variation: Sequence[float],
    workers: Sequence[int],
    rates: Sequence[float],
    threshold: float,
    slices: int = 1,
) -> list[Cell]:
    """Every number of workers with every rate; the latency stays as it is."""
    latency = setting.network.slowest("between")[0]
    return [
        _cell(
            replace(where, network=where.network.linked("between", latency, rate)), variation, methods, rate, threshold
        )
        for where, methods in (_at(setting, count, slices) for count in workers)
        for rate in rates
    ]


def _at(setting: Setting, workers: int, slices: int) -> tuple[Setting, list[tuple[Candidate, Method]]]:
    where = replace(setting, cluster=Cluster(workers, setting.cluster.per_node))
    return where, list(_methods(where, slices))


def _methods(where: Setting, slices: int) -> Iterator[tuple[Candidate, Method]]:
    for candidate in candidates(where.cluster, where.model.batch, slices):
        try:
            method = method_of(strategy_of(candidate.words), where.cluster, slices)
            method.memory_bytes(where.without_network)
        except ValueError:
            continue
        if method.equal:
            yield candidate, method


def _cell(
    where: Setting,
    variation: Sequence[float],
    methods: Sequence[tuple[Candidate, Method]],
    rate: float,
    threshold: float,
) -> Cell:
    factors = drawn(variation, where.cluster.workers, RUNS)
    found = [(candidate, float(method.seconds(where, factors).mean())) for candidate, method in methods]
    best = chosen(found, threshold)
    assert best is not None  # ddp serves every cluster
    assert any(candidate.words == BASELINE for candidate, _ in found)
    return Cell(where.cluster.workers, rate, {candidate.title: seconds for candidate, seconds in found}, best.title)
