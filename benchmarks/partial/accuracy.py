"""What partial backprop loses against `ddp`: accuracy at equal steps and at equal compute.

    python benchmarks/partial.py accuracy     # resumable; table and picture

Three recipes (made deeper, so that there is something to cut), three seeds, two CPU workers, the same batches and
optimizer. "Equal steps" trains as many steps as ddp; "equal compute" trains 1 / c times as many, c = (1 + 2 f) / 3 at
mean depth fraction f, so that both do the same arithmetic; the schedule stretches along. A warm-up of a quarter trains
the first quarter of the steps whole. Data of sanity scale.
"""

import argparse
import json
import multiprocessing
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from common.paths import RESULTS

os.environ.setdefault("OMP_NUM_THREADS", "1")

import matplotlib
import torch

from common.hardware import description, sentence, slug
from common.quiet_recipe import built, composed

matplotlib.use("Agg")
from matplotlib import pyplot as plt

torch.set_num_threads(1)

WORKERS = 2
RECIPES: dict[str, dict[str, Any]] = {
    "vit": {
        "words": ["recipe=vit", "model.config.num_hidden_layers=6"],
        "metric": "test/accuracy",
        "steps": 320,
    },
    "resnet": {
        "words": ["recipe=resnet", "model.config.depths=[2,2,2]"],
        "metric": "test/accuracy",
        "steps": 120,
    },
    "gpt": {
        "words": ["recipe=gpt", "model.config.n_layer=4"],
        "metric": "test/loss",
        "steps": 120,
    },
}
ORDERS = {
    "all depths in turn": "strategy.depth.order.fractions=null",
    "full and half in turn": "strategy.depth.order.fractions=[1.0,0.5]",
}
# Mean depth fraction at four segments, without the warm-up.
FRACTION = {"all depths in turn": 0.625, "full and half in turn": 0.75}


def compute(fraction: float, warm_up: float = 0.0) -> float:
    """(1 + 2 f) / 3 after a full-depth warm-up of this fraction of the run."""
    return warm_up + (1 - warm_up) * (1 + 2 * fraction) / 3


class Variant(NamedTuple):
    """One row: overrides, steps, compute of a mean step over that of ddp, factor of the learning rate."""

    words: list[str]
    steps: int
    compute: float
    rate: float = 1.0


def variants(steps: int) -> dict[str, Variant]:
    """Every run of a recipe that trains so many steps with ddp."""
    found = {"ddp": Variant(["strategy=ddp"], steps, 1.0)}
    base = ["strategy=partial_backprop", "strategy.cuts=3"]
    for name, order in ORDERS.items():
        cost = compute(FRACTION[name])
        found[f"{name}, equal steps"] = Variant([*base, order], steps, cost)
        found[f"{name}, equal compute"] = Variant([*base, order], round(steps / cost), cost)
        cost = compute(FRACTION[name], 0.25)
        for kind, length in {"steps": steps, "compute": round(steps / cost)}.items():
            warm = [*base, order, f"strategy.depth.warm_up={length // 4}"]
            found[f"{name}, warm-up of a quarter, equal {kind}"] = Variant(warm, length, cost)
    stairs = [*base, "strategy/depth=staircase"]
    found["staircase, equal steps"] = Variant(stairs, steps, compute((0.5 + 1.0) / 2))
    half = found["full and half in turn, equal steps"]
    found["full and half in turn, learning rate x 4/3, equal steps"] = half._replace(rate=4 / 3)
    found["ddp, learning rate x 4/3"] = found["ddp"]._replace(rate=4 / 3)
    return found


def train(words: list[str], metric: str, steps: int, rate: float, seed: int) -> float:
    """The test metric of one run."""
    settings = [f"trainer.devices={WORKERS}", f"trainer.max_steps={steps}", "trainer.max_epochs=-1"]
    cfg = composed([*words, *settings, "strategy.start_method=fork"], seed)
    cfg.optimizer.lr *= rate
    data, model, trainer = built(cfg)
    trainer.fit(model, datamodule=data)
    (row,) = trainer.test(model, datamodule=data, verbose=False)
    return float(row[metric])


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """Call it in a forked process of its own."""
    queue = multiprocessing.get_context("fork").SimpleQueue()
    process = multiprocessing.get_context("fork").Process(target=lambda: queue.put(function(*args)))
    process.start()
    process.join(1200)
    if process.exitcode != 0 or queue.empty():
        process.kill()
        raise SystemExit(f"{function.__name__}{args} ended with {process.exitcode}")
    return queue.get()


def rows(runs: dict[str, float]) -> tuple[list[str], dict[str, list[tuple[str, float, float]]]]:
    """Table and picture of what has run."""
    lines = ["| recipe | run | steps | compute | metric | mean ± deviation (seeds) | against ddp |", "| --- " * 7 + "|"]
    points: dict[str, list[tuple[str, float, float]]] = {}
    for recipe, plan in RECIPES.items():
        for name, run in variants(plan["steps"]).items():
            values = [v for k, v in runs.items() if k.startswith(f"{recipe} | {name} | ")]
            pairs = [
                (v, runs[f"{recipe} | ddp | {k.rpartition(' ')[2]}"])
                for k, v in runs.items()
                if k.startswith(f"{recipe} | {name} | ") and f"{recipe} | ddp | {k.rpartition(' ')[2]}" in runs
            ]
            if not pairs:
                continue
            spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
            difference = statistics.mean(a - b for a, b in pairs)
            total = run.steps / plan["steps"] * run.compute
            cells = [recipe, name, str(run.steps), f"{total:.2f}", plan["metric"]]
            mean = f"{statistics.mean(values):.4f}{spread} ({len(values)})"
            lines.append("| " + " | ".join([*cells, mean, "" if name == "ddp" else f"{difference:+.4f}"]) + " |")
            points.setdefault(recipe, []).append((name, total, statistics.mean(values)))
    return lines, points


def page(results: dict[str, Any]) -> str:
    """Markdown of what has run."""
    command = f"`python benchmarks/partial.py accuracy`, {WORKERS} CPU workers: {sentence(results['hardware'])}."
    lines, _ = rows(results["runs"])
    return f"{command} Compute in units of the ddp run's.\n\n" + "\n".join(lines) + "\n"


def draw(points: dict[str, list[tuple[str, float, float]]], path: Path) -> None:
    """Metric over compute, one panel for each recipe."""
    names = list(dict.fromkeys(name for rows in points.values() for name, _, _ in rows))
    figure, axes = plt.subplots(1, len(points), figsize=(4 * len(points), 4.6), squeeze=False)
    for axis, (recipe, rows) in zip(axes[0], points.items(), strict=True):
        for name, cost, value in rows:
            index = names.index(name)
            axis.plot(cost, value, "os^vD<>Pp*hX"[index % 12], color=f"C{index % 10}", label=name)
        axis.set(xlabel="compute against ddp", ylabel=RECIPES[recipe]["metric"], title=recipe)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=2, fontsize=7)
    figure.tight_layout(rect=(0, 0.2, 1, 1))
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    options = parser.parse_args()
    path = RESULTS / f"partial-accuracy-{slug()}.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    runs = results.setdefault("runs", {})
    results |= {"hardware": description(), "workers": WORKERS}
    for seed in options.seeds:
        for recipe in options.recipes:
            plan = RECIPES[recipe]
            for name, run in variants(plan["steps"]).items():
                key = f"{recipe} | {name} | {seed}"
                if key not in runs:
                    runs[key] = apart(train, [*plan["words"], *run.words], plan["metric"], run.steps, run.rate, seed)
                    path.write_text(json.dumps(results, indent=1))
                    print(key, runs[key], flush=True)
        draw(rows(runs)[1], path.with_suffix(".png"))
