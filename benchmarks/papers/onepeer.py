"""Rounds to exact consensus on graphs that change: one peer a round, log2 n rounds.

    python benchmarks/papers.py onepeer

Source: Ying et al. 2110.13363 (one-peer exponential graphs), Takezawa et al. 2305.11420 (every n).
"""

import torch

from lightning_decentral.gossip import BaseGraph, Exponential, Gossip, Hypercube, OnePeerExponential, Topology, simulate
from papers.row import Row, write

WORKERS, EXACT, MOST = (4, 8, 16, 32, 64), 1e-12, 200


def rounds(topology: Topology, workers: int) -> int:
    """Rounds until no worker is farther from the mean than `EXACT` of where it began."""
    torch.manual_seed(0)
    begun = torch.randn(workers, 8, dtype=torch.float64)
    there = simulate(topology, Gossip(), lambda x, step: torch.zeros_like(x), begun, MOST, 0.0, delay=0)
    off = (there - begun.mean(0)).abs().amax((1, 2))
    reached = (off < EXACT * off[0]).nonzero()
    return int(reached[0]) if len(reached) else MOST


def row() -> Row:
    exact = [rounds(OnePeerExponential(), n) for n in WORKERS]
    static = [
        (f"static exponential graph, {n} workers: rounds to 1e-12", rounds(Exponential(), n)) for n in WORKERS[:3]
    ]
    return Row(
        name="onepeer",
        paper="2110.13363",
        title="Time-varying graphs",
        headline="one-peer exponential graphs reach exact consensus in log2 n rounds (theorem)",
        compared=tuple(
            (f"{n} workers: rounds to exact consensus", float(n.bit_length() - 1), float(found))
            for n, found in zip(WORKERS, exact, strict=True)
        ),
        kind="formula",
        assumptions=("Exact is 1e-12 of the first distance from the mean, in float64; no gradients, no delay.",),
        cannot_compare="Their trainings on GPUs: their numbers weren't at hand; what is compared is the theorem.",
        further=(
            *((f"hypercube, {n} workers: rounds", rounds(Hypercube(), n)) for n in WORKERS),
            *((f"base graph of one peer, {n} workers: rounds", rounds(BaseGraph(1), n)) for n in (6, 12, 24)),
            *static,
            ("one-peer exponential graph, 12 workers: rounds to 1e-12", rounds(OnePeerExponential(), 12)),
        ),
    )


def main() -> None:
    write(row())
