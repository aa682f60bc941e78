"""Seconds and memory of simulating 1,024 workers for 1,000 steps of a quadratic, for every topology.

    python benchmarks/rehearse.py simulation

Worker i minimises 1/2 ||x - c_i||^2 in 10 dimensions under plain gossip, overlapped; the last state alone is kept.
Every topology runs in a process of its own, one thread; peak memory is that process's above what it had before, and
the seconds are its processor time. Writes `results/simulation-<hardware>.json`.
"""

import argparse
import inspect
import json
import multiprocessing
import os
import resource
import time

from common.paths import RESULTS

os.environ.setdefault("OMP_NUM_THREADS", "1")

from typing import Any

import networkx as nx
import torch
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import track

from common.hardware import description, sentence, slug
from lightning_decentral.gossip import (
    AlternatingExponentialRing,
    Complete,
    Every,
    FromGraph,
    Gossip,
    PeriodicAverage,
    Ring,
    Stream,
    Topology,
    simulate,
)
from lightning_decentral.gossip.plan import topology as face

torch.set_num_threads(1)
DIM, LEARNING_RATE = 10, 0.05


def topologies(size: int) -> list[Topology]:
    """Every class of the face; those that need arguments with some."""
    given: dict[type, Topology] = {
        AlternatingExponentialRing: AlternatingExponentialRing(8),
        Every: Every(8, Complete()),
        FromGraph: FromGraph(nx.random_regular_graph(4, size, seed=0)),
        PeriodicAverage: PeriodicAverage(8, Ring()),
        Stream: Stream(8, 2, Complete()),
    }
    found = [getattr(face, name) for name in face.__all__]
    return [given.get(cls) or cls() for cls in found if not inspect.isabstract(cls)]


def run(topology: Topology, size: int, steps: int) -> dict[str, float]:
    """Processor seconds, peak bytes, and how far the workers' mean is from where it must be."""
    centres = torch.randn(size, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    last = simulate(
        topology, Gossip(), lambda x, _: x - centres, torch.zeros_like(centres), steps, LEARNING_RATE, every=steps
    )[-1]
    seconds = time.process_time() - began
    expected = centres.mean(0) * (1 - (1 - LEARNING_RATE) ** steps)
    peak = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return {"seconds": seconds, "peak_bytes": peak, "error": float((last.mean(0) - expected).abs().max())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    for topology in track(topologies(options.workers), "topologies"):
        with multiprocessing.get_context("fork").Pool(1) as apart:
            found[repr(topology)[:60]] = apart.apply(run, (topology, options.workers, options.steps))
    path = RESULTS / f"simulation-{slug()}.json"
    results = {"hardware": description(), **vars(options), "topologies": found}
    path.write_text(json.dumps(results, indent=1))
    Console().print(Markdown(page(results)))


def page(results: dict[str, Any]) -> str:
    """Markdown of all topologies."""
    lines = ["| topology | seconds | peak MiB | error of the mean |", "| --- | --- | --- | --- |"]
    for name, row in results["topologies"].items():
        lines.append(f"| {name} | {row['seconds']:.1f} | {row['peak_bytes'] / 2**20:.0f} | {row['error']:.1e} |")
    words = f"{results['workers']} workers, {results['steps']} steps, {DIM} dimensions, one thread"
    about = f"`python benchmarks/rehearse.py simulation`, {words}: {sentence(results['hardware'])}."
    return f"{about}\n\n" + "\n".join(lines) + "\n"
