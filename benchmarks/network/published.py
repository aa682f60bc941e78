"""The published runs of the seed paper against this package's forecast, agreement and disagreement alike.

    python benchmarks/network.py published

The model is that of `papers/gossip.py`: of each cluster two numbers are known to it, all-reduce on the fewest and on
the most GPUs, and it predicts the others. All-reduce goes by trees over the nodes, and each flow through a node's card
has a rate of its own: by bytes of rings over all GPUs that share the card, the order of the methods comes out wrong.

Source: Wang et al. 2410.11998 (milliseconds; base transformer of 65 million parameters).
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from papers.gossip import METHODS, Calibrated, Published, calibrated, errors, held_out, orders

ALL_REDUCE, SGP, EXPONENTIAL, RING = METHODS
SHOWN = (ALL_REDUCE, EXPONENTIAL, RING)
"""SGP is left out: it is the exponential graph without overlap."""
ALIKE = 1 + 1e-6


@dataclass(frozen=True)
class Verdict:
    """Comparison of one published run with its prediction, in milliseconds.

    Args:
        known: whether its all-reduce is one of the two numbers of the calibration.
    """

    cluster: Published
    workers: int
    milliseconds: Mapping[str, float]
    published: Mapping[str, float]
    known: bool

    @property
    def winner_agrees(self) -> bool:
        """Return whether the alternating ring is predicted to be as fast as any, as it was measured."""
        return self.milliseconds[RING] <= min(self.milliseconds.values()) * ALIKE

    @property
    def order_agrees(self) -> bool:
        """Return whether the methods' order is the measured one; equal predictions agree with any."""
        ring, peer, reduced = (self.milliseconds[name] for name in (RING, EXPONENTIAL, ALL_REDUCE))
        return ring <= peer * ALIKE and peer <= reduced * ALIKE

    def ratio(self, method: str) -> float:
        """Predicted over published."""
        return self.milliseconds[method] / self.published[method]

    @property
    def cells(self) -> list[str]:
        """Predicted and published milliseconds of each method, and how many times all-reduce's the ring is faster."""
        star = {ALL_REDUCE: "*" if self.known else ""}
        times = [f"{self.milliseconds[m]:.1f}/{self.published[m]:.1f}{star.get(m, '')}" for m in SHOWN]
        gains = (of[ALL_REDUCE] / of[RING] for of in (self.milliseconds, self.published))
        return [*times, "/".join(f"{gain:.2f}" for gain in gains)]


def compare(models: Sequence[Calibrated] | None = None) -> Iterator[Verdict]:
    """Every run."""
    for model in models or calibrated():
        table = model.cluster.table
        for workers, found in table.items():
            predicted, published = (dict(zip(METHODS, of, strict=True)) for of in (model.predicted(workers), found))
            known = workers in (min(table), max(table))
            shown = ({name: of[name] for name in SHOWN} for of in (predicted, published))
            yield Verdict(model.cluster, workers, *shown, known)


def table(verdicts: Sequence[Verdict]) -> Table:
    """Milliseconds, predicted / published."""
    title = "2410.11998, base transformer: milliseconds per iteration, predicted/published (*: calibrated on it)"
    found = Table(title=title, title_justify="left")
    for heading in ("GPUs", *SHOWN, "ring x all-reduce", "order"):
        found.add_column(heading)
    for v in verdicts:
        found.add_row(f"{v.workers} {v.cluster.name}", *v.cells, "agrees" if v.order_agrees else "DISAGREES")
    return found


def sentences(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Agreement and disagreement."""
    runs, models = len(verdicts), calibrated()
    shared = calibrated(trees=False, own_flows=False)
    yield f"the fastest method agrees in {sum(v.winner_agrees for v in verdicts)} of {runs} runs"
    yield f"the order of all three agrees in {sum(v.order_agrees for v in verdicts)} of {runs}"
    for name in SHOWN:
        ratios = [v.ratio(name) for v in verdicts if name != ALL_REDUCE or not v.known]
        yield f"{name}: predicted / published from {min(ratios):.2f} to {max(ratios):.2f}"
    off = errors(held_out(models))
    spread = f"median error {statistics.median(off):.0%}, largest {max(off):.0%}"
    yield f"{len(off)} numbers that weren't calibrated on: {spread}"
    yield (
        f"by bytes of rings over all GPUs that share a node's card the order agrees in {orders(shared)} of {runs}: "
        "how an all-reduce goes, and what a flow gets, must be measured on your own cluster"
    )


def main() -> None:
    verdicts, console = list(compare()), Console()
    console.print(table(verdicts))
    for sentence in sentences(verdicts):
        console.print(sentence, soft_wrap=True, highlight=False, markup=False)
