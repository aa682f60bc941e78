"""Ravnest's claim, a speed-up that is linear in the clusters, by asynchronous gossip on a virtual clock.

    gradient = x + noise,  learning rate 0.01 n                 n clusters, in the end as far from 0 for every n

Each cluster steps at its own pace, sends its parameters to all others and averages what has come. Seconds until the
mean model's squared distance has fallen to a fiftieth, against one cluster's. Source: Menon et al. 2401.01728.
"""

from functools import cache

import torch
from torch import Tensor

from lightning_decentral.gossip import Complete, simulate_asynchronous
from papers.row import Row, write

DIMENSIONS, NOISE, LEARNING_RATE, LEVEL = 2000, 1.0, 0.01, 0.02
CLUSTERS = (2, 4, 8)
SLOWEST = 3.0  # times as long as the fastest cluster's step, where they are uneven
TRANSIT = 0.5
"""Seconds of a message, of a step of 1."""


@cache
def seconds(clusters: int, slowest: float = 1.0) -> float:
    """Seconds until the level, where the paces spread evenly from 1 to `slowest`, a step's seconds."""
    random = torch.Generator().manual_seed(0)
    spread = [1 + (slowest - 1) * i / max(1, clusters - 1) for i in range(clusters)]

    def gradient(worker: int, x: Tensor, round: int) -> Tensor:
        return x + NOISE * torch.randn(len(x), generator=random, dtype=x.dtype)

    found = simulate_asynchronous(
        Complete(),
        gradient,
        torch.ones(clusters, DIMENSIONS, dtype=torch.float64),
        seconds=float(int(300 * slowest / clusters)),
        learning_rate=LEARNING_RATE * clusters,
        pace=lambda worker, round: spread[worker] * (1 + 1e-3 * worker),
        transit=lambda source, target: TRANSIT,
    )
    distance = found.mean(1).square().mean(1)
    reached = (distance < LEVEL).nonzero()
    assert len(reached), f"{clusters} clusters: {distance[-1]:.3f}"
    last = int(reached[0])
    # Between the rows, linearly in the logarithm.
    before, after = (float(distance[i].log()) for i in (last - 1, last))
    return last - 1 + (before - float(torch.tensor(LEVEL).log())) / (before - after)


def row() -> Row:
    alone = seconds(1)
    return Row(
        name="ravnest",
        paper="2401.01728",
        title="Ravnest",
        headline="a speed-up that is linear in the number of asynchronous clusters (abstract)",
        compared=tuple((f"times sooner, {n} clusters", float(n), alone / seconds(n)) for n in CLUSTERS),
        kind="virtual clock",
        assumptions=(
            "A noisy quadratic of 2,000 dimensions stands for the model; clusters share one distribution of data and "
            "take equally long for a step.",
            "The learning rate grows with the number of clusters, so that all end equally far from the optimum; each "
            "cluster sends to all others after each step, messages take half a step, and nobody waits.",
        ),
        cannot_compare="Seconds, memory and accuracy of their models: the abstract gives no number, and its rate is a "
        "bound up to constants.",
        further=tuple(
            (f"times sooner, {n} clusters, the slowest {SLOWEST:g} x slower", alone / seconds(n, SLOWEST))
            for n in CLUSTERS
        ),
    )


def main() -> None:
    write(row())
