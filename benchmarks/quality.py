"""Does the mean model under gossip reach what `ddp` reaches at equal steps? Three recipes, three seeds.

    python benchmarks/quality.py

Each run is `python recipes/train.py recipe=... strategy=... seed=...` with four CPU workers and nothing else changed:
the same steps, batches, learning rate and optimizer. The data are embedded ones, of sanity scale: scikit-learn's
digits (test accuracy) and the help texts of the Python in use (test loss, nats per byte). Writes
`results/quality-<hardware>.json` and `.md`; finished runs are kept in the first, so that a broken-off benchmark goes
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

from hardware import description, slug
from rich.progress import Progress

ROOT = Path(__file__).parent.parent
METRICS = {"vit": "test/accuracy", "resnet": "test/accuracy", "gpt": "test/loss"}
ALLOWED = {"test/accuracy": 0.01, "test/loss": 0.02}
STRATEGIES = ("ddp", "gossip")


def train(recipe: str, strategy: str, seed: int, overrides: list[str]) -> float:
    """The test metric of one run from the command line."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "recipes/train.py", f"recipe={recipe}", f"strategy={strategy}", f"seed={seed}"]
        command += ["trainer=cpu", "trainer.devices=4", "callbacks=none", "+trainer.enable_progress_bar=false"]
        command += ["+trainer.enable_checkpointing=false", f"hydra.run.dir={folder}", *overrides]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        with next(Path(folder).rglob("metrics.csv")).open() as stream:
            values = [row[METRICS[recipe]] for row in csv.DictReader(stream) if row.get(METRICS[recipe])]
    return float(values[-1])


def table(runs: dict[str, float], seeds: list[int]) -> str:
    """Markdown: mean over the seeds and the spread, per recipe and strategy, and the verdict."""
    lines = [
        "| recipe | metric | ddp | gossip | difference | allowed | within |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for recipe, metric in METRICS.items():
        values = {s: [runs[f"{recipe} {s} {seed}"] for seed in seeds] for s in STRATEGIES}
        mean = {s: statistics.mean(v) for s, v in values.items()}
        cells = [f"{mean[s]:.4f} ± {statistics.stdev(values[s]):.4f}" for s in STRATEGIES]
        worse = (mean["ddp"] - mean["gossip"]) * (-1 if metric == "test/loss" else 1)
        within = "yes" if worse <= ALLOWED[metric] else "no"
        difference = f"{mean['gossip'] - mean['ddp']:+.4f}"
        lines.append(f"| {recipe} | {metric} | {cells[0]} | {cells[1]} | {difference} | {ALLOWED[metric]} | {within} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("overrides", nargs="*", help="more words for recipes/train.py")
    options = parser.parse_args()
    path = Path(__file__).parent / "results" / f"quality-{slug()}.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    runs = results.setdefault("runs", {})
    results |= {"hardware": description(), "overrides": options.overrides}
    todo = [
        (r, s, seed) for seed in options.seeds for r in METRICS for s in STRATEGIES if f"{r} {s} {seed}" not in runs
    ]
    with Progress() as progress:
        task = progress.add_task("runs", total=len(todo))
        for recipe, strategy, seed in todo:
            progress.update(task, description=f"{recipe} {strategy} seed {seed}")
            runs[f"{recipe} {strategy} {seed}"] = train(recipe, strategy, seed, options.overrides)
            path.write_text(json.dumps(results, indent=1))
            progress.advance(task)
    about = ", ".join(f"{key} {value}" for key, value in description().items())
    command = f"`python benchmarks/quality.py`, four CPU workers, seeds {options.seeds}: {about}."
    text = f"{command}\n\n{table(runs, options.seeds)}\n"
    path.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
