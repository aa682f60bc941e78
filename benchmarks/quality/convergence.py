"""Which rule on which graph, when every worker has other classes? Sixteen workers in one process, by `simulate`.

    python benchmarks/quality.py convergence

Each worker trains its own multilayer perceptron on its own shard of scikit-learn's digits; the shards' classes are
drawn from a Dirichlet distribution (alpha 1: mixed, 0.1: skewed, 0.01: one or two classes a worker). Reported is the
worst worker's test accuracy after a short budget, mean over three seeds: once at a constant learning rate, once with a
tenth of it in the last fifth of the steps. Learning rate and momentum are tuned for each method, schedule and alpha
over the same grid, on examples that are neither trained nor tested on. The shape is that of table 2 of RelaySum (Vogels
et al. 2110.04175). Writes `results/convergence-<hardware>` as json and png; finished cells are kept in the first,
so that a broken-off benchmark goes on where it was.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from common.hardware import description, slug
from common.paths import RESULTS
from lightning_decentral.gossip import simulate
from quality.convergence_methods import METHODS, WORKERS, Method
from quality.convergence_report import plot, text
from quality.shards import Digits, Network, digits, dirichlet_shards, skew

ALPHAS = (1.0, 0.1, 0.01)
SEEDS = (0, 1, 2)
STEPS, BATCH = 200, 16
LAST_STEPS = 0.2
SCHEDULES = {"constant": 1.0, "falling": 0.1}
"""Name -> factor of the learning rate in the last fifth of the steps."""


@dataclass(frozen=True)
class Setting:
    """One point of the tuning grid: v = momentum v + g, x -= learning_rate v."""

    learning_rate: float
    momentum: float


GRID = tuple(Setting(rate, momentum) for rate, momentum in ((0.3, 0.0), (1.0, 0.0), (0.1, 0.9), (0.3, 0.9), (1.0, 0.9)))
"""3 with and without momentum and 0.1 without were tried for two fifths of the cells, and were never the best there."""


class Descent:
    """The workers' updates for all grid points and seeds at once: rows [workers, grid x seeds x dim].

    Every rule that is compared acts on each column by itself, so one simulation holds them all.
    """

    def __init__(self, alpha: float, seeds: Sequence[int], grid: Sequence[Setting]) -> None:
        self.trained, self.tuned, self.tested = digits()
        self.network = Network()
        labels = self.trained.labels.numpy()
        shards = [dirichlet_shards(labels, WORKERS, alpha, seed) for seed in seeds]
        self.skew = statistics.mean(skew(labels, shard) for shard in shards)
        self._shards = torch.tensor([[s.tolist() for s in shard] for shard in shards]).transpose(0, 1)
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._rates = torch.tensor([setting.learning_rate for setting in grid]).view(-1, 1, 1)
        self._momenta = torch.tensor([setting.momentum for setting in grid]).view(-1, 1, 1)
        starts = torch.stack([self.network.start(seed) for seed in seeds])
        self.shape = (WORKERS, len(grid), *starts.shape)
        self.start = starts.expand(self.shape).reshape(WORKERS, -1)
        self._velocity = torch.zeros(self.shape)

    def __call__(self, rows: Tensor, step: int) -> Tensor:
        """Learning rate x velocity; `simulate` subtracts it, times what the schedule leaves of the learning rate."""
        chosen = self._batch()
        wide = (*self.shape[:3], BATCH)
        images = self.trained.images[chosen].unsqueeze(1).expand(*wide, 64).reshape(-1, BATCH, 64)
        labels = self.trained.labels[chosen].unsqueeze(1).expand(wide).reshape(-1, BATCH)
        gradients = self.network.gradients(rows.view(-1, self.shape[-1]), images, labels)
        self._velocity.mul_(self._momenta).add_(gradients.view(self.shape))
        return (self._velocity * self._rates).view(WORKERS, -1)

    def _batch(self) -> Tensor:
        """[workers, seeds, batch] indices into the training split; the same for every method."""
        places = [torch.randint(self._shards.shape[-1], (WORKERS, BATCH), generator=g) for g in self._generators]
        return self._shards.gather(2, torch.stack(places, dim=1))

    def accuracy(self, rows: Tensor, of: Digits) -> tuple[Tensor, Tensor]:
        """The worst worker's and the mean model's accuracy, [grid, seeds] each."""
        each = self.network.accuracy(rows.reshape(-1, self.shape[-1]), of).view(self.shape[:3])
        mean = self.network.accuracy(rows.mean(0).view(-1, self.shape[-1]), of).view(self.shape[1:3])
        return each.amin(0), mean


def simulated(method: Method, descent: Descent, factors: Sequence[float]) -> Tensor:
    """The workers' parameters at the end; `factors` of the learning rate, one for each step."""
    arguments = (method.topology, method.combine, descent, descent.start, len(factors), factors.__getitem__)
    return simulate(*arguments, method.delay, every=len(factors))[-1]


def cell(
    method: Method,
    schedule: str,
    alpha: float,
    seeds: Sequence[int] | None = None,
    grid: Sequence[Setting] = GRID,
    steps: int | None = None,
) -> dict[str, Any]:
    """The worst worker's test accuracy for every seed, at the setting whose worst worker is the best in tuning."""
    started, steps = time.process_time(), steps or STEPS
    factors = [1.0 if step < (1 - LAST_STEPS) * steps else SCHEDULES[schedule] for step in range(steps)]
    descent = Descent(alpha, seeds or SEEDS, grid)
    last = simulated(method, descent, factors)
    tuning, _ = descent.accuracy(last, descent.tuned)
    worst, mean = descent.accuracy(last, descent.tested)
    best = int(tuning.mean(1).argmax())
    return {
        "worst": worst[best].tolist(),
        "mean_model": mean[best].tolist(),
        "learning_rate": grid[best].learning_rate,
        "momentum": grid[best].momentum,
        "tuning": tuning.mean(1).tolist(),
        "skew": descent.skew,
        "cpu_seconds": round(time.process_time() - started, 1),
    }


def key(method: Method, schedule: str, alpha: float) -> str:
    """Return the key of a cell in the results."""
    return f"{method.key} | {schedule} | alpha {alpha:g}"


def run(path: Path, only: str) -> None:
    """Run what isn't in `path` yet, then draw the picture."""
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    results |= {"hardware": description(), "grid": [vars(setting) for setting in GRID]}
    cells = results.setdefault("cells", {})
    every = [(m, s, a) for m in METHODS if only in m.key for s in SCHEDULES for a in ALPHAS]
    todo = [parts for parts in every if key(*parts) not in cells]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("cells", total=len(todo))
        for parts in todo:
            progress.update(task, description=key(*parts))
            cells[key(*parts)] = cell(*parts)
            path.write_text(json.dumps(results, indent=1) + "\n")
            progress.advance(task)
    plot(results, METHODS, tuple(SCHEDULES), ALPHAS, key, path.with_suffix(".png"))


def page(results: dict[str, Any]) -> str:
    """Markdown of what has run."""
    return text(results, METHODS, tuple(SCHEDULES), ALPHAS, key)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the rows whose name contains this text")
    torch.set_num_threads(1)  # the tensors are too small for more
    run(RESULTS / f"convergence-{slug()}.json", parser.parse_args().only)
