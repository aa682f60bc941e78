"""The published runs of the seed paper against this package's forecast, agreement and disagreement alike.

    python benchmarks/network.py published

Known of each run: GPUs, GPUs per node, the network card's nominal rate, milliseconds per iteration under three methods,
the model's parameters. Not known, and assumed: the computation takes the fastest method's time (it can't take more),
spread evenly over the 12 layers, a third of it forward; 4 bytes per parameter; the card gives its nominal rate; within
a node messages take no time, as little as latency does.

Source: Wang et al. 2410.11998 (milliseconds; base transformer of 65 million parameters, 6 + 6 layers as in 1706.03762).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from rich.console import Console
from rich.table import Table

from lightning_decentral.gossip.plan.forecast import GossipForecast
from lightning_decentral.gossip.plan.topology.combined import AlternatingExponentialRing
from lightning_decentral.gossip.plan.topology.one_peer import OnePeerExponential
from lightning_decentral.shared.plan.data_parallel import DataParallel
from lightning_decentral.shared.plan.forecast import Cluster, Method, Setting, even
from lightning_decentral.shared.plan.network import Network
from lightning_decentral.shared.plan.profile import BlockCost, LinkCost, Model

PARAMETER_BYTES = 4 * 65_000_000
LAYERS = 12
ALL_REDUCE, ONE_PEER, RING = "all-reduce", "one-peer exponential", "alternating ring"
CLOSE = 0.1


@dataclass(frozen=True)
class Published:
    """One run. gbit_per_second: of a node's network card, nominal."""

    gpu: str
    per_node: int
    gbit_per_second: float
    workers: int
    milliseconds: Mapping[str, float]


def _run(gpu: str, per_node: int, gbit: float, workers: int, *milliseconds: float) -> Published:
    return Published(gpu, per_node, gbit, workers, dict(zip((ALL_REDUCE, ONE_PEER, RING), milliseconds, strict=True)))


RUNS = (
    _run("A40", 4, 25, 8, 166.1, 122.8, 122.0),
    _run("A40", 4, 25, 16, 195.5, 97.4, 78.9),
    _run("A40", 4, 25, 32, 188.5, 110.8, 67.9),
    _run("T4", 8, 100, 64, 167.3, 123.1, 122.2),
    _run("A100", 4, 100, 32, 51.5, 44.7, 43.7),
)


@dataclass(frozen=True)
class Verdict:
    """Comparison of one published run with its prediction.

    Args:
        milliseconds: predicted.
    """

    run: Published
    milliseconds: Mapping[str, float]

    @property
    def winner_agrees(self) -> bool:
        """Return whether the alternating ring is predicted to be as fast as any, as it was measured."""
        return self.milliseconds[RING] <= min(self.milliseconds.values()) * (1 + 1e-9)

    @property
    def order_agrees(self) -> bool:
        """Return whether the methods' order is the measured one; equal predictions agree with any."""
        ring, peer, reduced = (self.milliseconds[name] for name in (RING, ONE_PEER, ALL_REDUCE))
        return ring <= peer * (1 + 1e-9) and peer <= reduced * (1 + 1e-9)

    def ratio(self, method: str) -> float:
        """Predicted over published."""
        return self.milliseconds[method] / self.run.milliseconds[method]

    def speedup(self, milliseconds: Mapping[str, float]) -> float:
        """Return the speed-up of the alternating ring over all-reduce."""
        return milliseconds[ALL_REDUCE] / milliseconds[RING]

    @property
    def far(self) -> list[str]:
        """Methods whose prediction is more than a tenth away."""
        return [name for name in self.milliseconds if abs(self.ratio(name) - 1) > CLOSE]


def setting(run: Published) -> Setting:
    """The run's hardware, with the assumptions above."""
    seconds = min(run.milliseconds.values()) / 1e3
    share = seconds / LAYERS
    blocks = [BlockCost(f"layer {i}", share / 3, share * 2 / 3, 0.0, PARAMETER_BYTES // LAYERS) for i in range(LAYERS)]
    card = LinkCost("exchange", "between", 2, 1, 0.0, run.gbit_per_second * 1e9 / 8)
    network = Network((card, LinkCost("exchange", "inside", 2, 1, 0.0, inf)))
    return Setting(Model("transformer-base", run.gpu, tuple(blocks)), network, Cluster(run.workers, run.per_node))


def methods(run: Published) -> dict[str, Method]:
    """Return the methods that were measured."""
    ring = GossipForecast(AlternatingExponentialRing(run.per_node))
    return {ALL_REDUCE: DataParallel(), ONE_PEER: GossipForecast(OnePeerExponential()), RING: ring}


def compare() -> Iterator[Verdict]:
    """Every run."""
    for run in RUNS:
        where = setting(run)
        seconds = {name: method.seconds(where, even(run.workers))[0] for name, method in methods(run).items()}
        yield Verdict(run, {name: 1e3 * float(value) for name, value in seconds.items()})


def table(verdicts: Sequence[Verdict]) -> Table:
    """Milliseconds, predicted / published."""
    title = "2410.11998, base transformer: milliseconds per iteration, predicted / published"
    found = Table(title=title, title_justify="left")
    for heading in ("GPUs", *verdicts[0].milliseconds, "ring x all-reduce", "fastest", "more than 10 % off"):
        found.add_column(heading)
    for v in verdicts:
        times = (f"{v.milliseconds[name]:.1f} / {known:.1f}" for name, known in v.run.milliseconds.items())
        ratio = f"{v.speedup(v.milliseconds):.2f} / {v.speedup(v.run.milliseconds):.2f}"
        fastest = "agrees" if v.winner_agrees else "DISAGREES"
        found.add_row(f"{v.run.workers} {v.run.gpu}", *times, ratio, fastest, ", ".join(v.far) or "none")
    return found


def sentences(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Agreement and disagreement."""
    runs = len(verdicts)
    yield f"the fastest method agrees in {sum(v.winner_agrees for v in verdicts)} of {runs} runs"
    yield f"the order of all three agrees in {sum(v.order_agrees for v in verdicts)} of {runs}"
    for name in verdicts[0].milliseconds:
        ratios = [v.ratio(name) for v in verdicts]
        yield f"{name}: predicted / published from {min(ratios):.2f} to {max(ratios):.2f}"
    yield (
        "from bytes and nominal bandwidth alone: computation taken as the fastest method's time, 4 bytes a parameter, "
        "free messages within a node. These don't explain the published one-peer runs: measure your own cluster"
    )


def main() -> None:
    verdicts, console = list(compare()), Console()
    console.print(table(verdicts))
    for sentence in sentences(verdicts):
        console.print(sentence, soft_wrap=True, highlight=False, markup=False)
