"""Does the mean model under gossip reach what `ddp` reaches at equal steps? Three recipes, three seeds.

    python benchmarks/quality.py

Each run is `python recipes/train.py recipe=... strategy=... seed=...` with four CPU workers: the same steps, batches
and optimizer. The data are embedded ones, of sanity scale: scikit-learn's
digits (test accuracy) and the help texts of the Python in use (test loss, nats per byte). Writes
`results/quality-<hardware>.json`; finished runs are kept in it, so that a broken-off benchmark goes
on where it was.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.progress import Progress

from common.hardware import description, sentence, slug
from common.paths import RESULTS, ROOT

METRICS = {"vit": "test/accuracy", "resnet": "test/accuracy", "gpt": "test/loss"}
ALLOWED = {"test/accuracy": 0.01, "test/loss": 0.02}

# What is run for each recipe, the yardstick first. SGD (resnet) is linear in the gradient and Adam on digits (vit) has
# little noise to divide by; the GPT recipe has, so there gossip uses the optimizer made for it, and what either
# optimizer or twice the learning rate does to either strategy is run too, so that the choice can be judged.
SAME = {"ddp": ["strategy=ddp"], "gossip": ["strategy=gossip"]}
ACCUMULATED = {f"{name}, AccumAdamW": [*words, "optimizer=accum_adamw"] for name, words in SAME.items()}
LARGER = {"ddp, learning rate x 2": [*SAME["ddp"], "optimizer.lr=6e-3"]}
LARGER["gossip, AccumAdamW, learning rate x 2"] = [*ACCUMULATED["gossip, AccumAdamW"], "optimizer.lr=6e-3"]
AVERAGED = ["strategy/topology=complete", "strategy.delay=0"]  # all parameters after every step: no distance
LARGER["the same, all averaged in every step"] = [*LARGER["gossip, AccumAdamW, learning rate x 2"], *AVERAGED]
GPT = {"ddp": SAME["ddp"], **dict(reversed(ACCUMULATED.items())), **SAME, **LARGER}
VARIANTS = {"vit": SAME, "resnet": SAME, "gpt": GPT}


def train(recipe: str, seed: int, overrides: list[str]) -> float:
    """The test metric of one run from the command line."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "recipes/train.py", f"recipe={recipe}", f"seed={seed}", *overrides]
        command += ["trainer=cpu", "trainer.devices=4", "callbacks=none", "+trainer.enable_progress_bar=false"]
        command += ["+trainer.enable_checkpointing=false", f"hydra.run.dir={folder}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        with next(Path(folder).rglob("metrics.csv")).open() as stream:
            values = [row[METRICS[recipe]] for row in csv.DictReader(stream) if row.get(METRICS[recipe])]
    return float(values[-1])


def table(runs: dict[str, float], seeds: list[int]) -> str:
    """Markdown: mean over the seeds and their standard deviation, against the recipe's ddp run; only what has run."""
    lines = ["| recipe | run | metric | mean ± deviation | against ddp | allowed | within |", "| --- " * 7 + "|"]
    for recipe, metric in METRICS.items():
        yardstick = [runs[f"{recipe} ddp {seed}"] for seed in seeds]
        for variant in VARIANTS[recipe]:
            values = [runs[key] for seed in seeds if (key := f"{recipe} {variant} {seed}") in runs]
            if len(values) < len(seeds):
                continue
            difference = statistics.mean(values) - statistics.mean(yardstick)
            worse = difference if metric == "test/loss" else -difference
            within = "yes" if worse <= ALLOWED[metric] else "no"
            verdict = "| | |" if variant == "ddp" else f"{difference:+.4f} | {ALLOWED[metric]} | {within} |"
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            cells = [recipe, variant, metric, f"{statistics.mean(values):.4f} ± {spread:.4f}", verdict]
            lines.append("| " + " | ".join(cells))
    return "\n".join(lines)


def page(results: dict[str, Any]) -> str:
    """Markdown of the seeds that have run."""
    seeds = sorted({int(key.rpartition(" ")[2]) for key in results["runs"]})
    command = f"`python benchmarks/quality.py`, four CPU workers, seeds {seeds}: {sentence(results['hardware'])}."
    return f"{command}\n\n{table(results['runs'], seeds)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("overrides", nargs="*", help="more words for recipes/train.py")
    options = parser.parse_args()
    path = RESULTS / f"quality-{slug()}.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    runs = results.setdefault("runs", {})
    results |= {"hardware": description(), "overrides": options.overrides}
    places = range(max(map(len, VARIANTS.values())))
    order = [(r, v) for place in places for r in METRICS for v in list(VARIANTS[r])[place : place + 1]]
    todo = [(r, v, seed) for r, v in order for seed in options.seeds if f"{r} {v} {seed}" not in runs]
    with Progress() as progress:
        task = progress.add_task("runs", total=len(todo))
        for recipe, variant, seed in todo:
            progress.update(task, description=f"{recipe} {variant} seed {seed}")
            runs[f"{recipe} {variant} {seed}"] = train(recipe, seed, [*VARIANTS[recipe][variant], *options.overrides])
            path.write_text(json.dumps(results, indent=1))
            progress.advance(task)
    print(page(results))
