"""Push-sum with coded messages on a directed graph: the rate of exact messages, 1 / sqrt(n T).

    python benchmarks/papers.py pushsum

Least squares with other minima on every worker and noise in every gradient; the learning rate is sqrt(n / T) times a
number. Reported is how the squared gradient at the workers' mean, its mean over T steps, falls with T and with n.

Source: Taheri et al. 2002.09964.
"""

import math
from collections.abc import Callable, Sequence

import networkx as nx
import torch
from torch import Tensor

from lightning_decentral.gossip import (
    DifferenceCompression,
    FromGraph,
    Int4,
    PushSum,
    Rule,
    Topology,
    simulate,
)
from lightning_decentral.shared.compute.codec.codec import Codec
from papers.row import Row, write

DIMENSIONS, NOISE, FIRST, SPREAD, RATE = 128, 4.0, 1.0, 1.0, 0.5
STEPS, WORKERS, FEW = (50, 200, 800), (4, 8, 16, 32), 200
Update = Callable[[Tensor], Tensor]


def directed(workers: int) -> Topology:
    """A ring in one direction and, from worker 0, an edge to every fourth: out-degrees differ, as push-sum allows."""
    edges = [(i, (i + 1) % workers) for i in range(workers)] + [(0, j) for j in range(2, workers, 4)]
    return FromGraph(nx.DiGraph(edges))


def squared_gradient(
    topology: Topology, rule: Rule, workers: int, steps: int, codec: Codec | None = None, update: Update | None = None
) -> float:
    """Mean over the steps of the squared gradient at the mean of the workers, per dimension."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    minima = SPREAD * draw(workers, DIMENSIONS)
    minima -= minima.mean(0)

    def gradient(x: Tensor, step: int) -> Tensor:
        found = x - minima + NOISE * draw(workers, DIMENSIONS)
        return update(found) if update else found

    begun = torch.full((workers, DIMENSIONS), FIRST)
    rate = RATE * math.sqrt(workers / steps)
    rows = simulate(topology, rule, gradient, begun, steps, rate, delay=0, codec=codec)
    return float(rows.mean(1).square().mean())


def exponent(places: Sequence[int], values: Sequence[float]) -> float:
    """Slope of log(value) over log(place), from the first to the last."""
    return math.log(values[-1] / values[0]) / math.log(places[-1] / places[0])


def row() -> Row:
    code, topology = DifferenceCompression(Int4()), directed(8)
    exact = [squared_gradient(topology, PushSum(), 8, steps) for steps in STEPS]
    coded = [squared_gradient(topology, PushSum(), 8, steps, code) for steps in STEPS]
    by_workers = [squared_gradient(directed(n), PushSum(), n, FEW) for n in WORKERS]
    return Row(
        name="pushsum",
        paper="2002.09964",
        title="Push-sum with codes",
        headline="coded messages keep the rate of exact ones, 1 / sqrt(T), on directed graphs (theorems)",
        compared=(
            ("exponent of T, 4-bit codes of differences", -0.5, exponent(STEPS, coded)),
            ("exponent of T, exact messages", -0.5, exponent(STEPS, exact)),
            ("error with codes over error without, 800 steps", 1.0, coded[-1] / exact[-1]),
        ),
        kind="formula",
        assumptions=(
            "Least squares on 8 workers with minima of their own and noise in every gradient; 50 to 800 steps.",
            "The theorem bounds from above; measured is the slope of the mean squared gradient over log T.",
            "The codes are 4-bit with a scale for 128 numbers; the theorem takes any unbiased code.",
        ),
        cannot_compare="Their trainings of neural networks: their numbers weren't at hand.",
        further=(
            ("exponent of the number of workers, 4 to 32, exact messages", exponent(WORKERS, by_workers)),
            ("bits of a number on the wire", 4 + 32 / 128),
        ),
    )


def main() -> None:
    write(row())
