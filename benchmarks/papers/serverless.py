"""Decentralized Adam-type steps that average in every p-th step only: the error falls with the number of workers.

The problem of `pushsum.py` on a ring, every worker with its own Adam whose direction takes the gradient's place.
RandomTMA (2305.09887), 2.31 x faster than the fastest of its peers, has no row: it trains graph networks on random
parts of a graph, and the package has neither such networks nor such data.

Source: Gao and Huang, adaptive serverless learning, 2008.10422.
"""

import torch
from torch import Tensor

from lightning_decentral.gossip import Every, Gossip, Ring
from papers.pushsum import NOISE, exponent, squared_gradient
from papers.row import Row, write

STEPS, WORKERS, PERIODS = 400, (4, 8, 16, 32), (1, 4)
BETAS = (0.9, 0.999)


class Adam:
    """The direction m / sqrt(v) of every worker, times the noise that it is divided by."""

    def __init__(self) -> None:
        self.first = self.second = torch.zeros(())
        self.steps = 0

    def __call__(self, gradient: Tensor) -> Tensor:
        a, b = BETAS
        self.steps += 1
        self.first = a * self.first + (1 - a) * gradient
        self.second = b * self.second + (1 - b) * gradient.square()
        mean, square = self.first / (1 - a**self.steps), self.second / (1 - b**self.steps)
        return NOISE * mean / (square.sqrt() + 1e-8)


def errors(period: int) -> list[float]:
    ring = Every(period, Ring())
    return [squared_gradient(ring, Gossip(), workers, STEPS, update=Adam()) for workers in WORKERS]


def row() -> Row:
    found = {period: errors(period) for period in PERIODS}
    return Row(
        name="serverless",
        paper="2008.10422",
        title="Adaptive serverless learning",
        headline="Adam-type steps, averaged in every p-th step, with a linear speed-up by workers (theorem)",
        compared=tuple(
            (f"exponent of the number of workers, p = {period}", -0.5, exponent(WORKERS, values))
            for period, values in found.items()
        ),
        kind="formula",
        assumptions=(
            "Least squares with noise in every gradient, 400 steps, a ring of 4 to 32 workers, rate by sqrt(n / T).",
            "A linear speed-up is an error of 1 / sqrt(n T): exponent -0.5 at equal steps.",
        ),
        cannot_compare="Their trainings on images: their numbers weren't at hand.",
        further=(("error with p = 4 over error with p = 1, 32 workers", found[4][-1] / found[1][-1]),),
    )


def main() -> None:
    write(row())
