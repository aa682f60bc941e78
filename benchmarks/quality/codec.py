"""Does training with encoded messages reach what it reaches with messages as they are? Three recipes, three seeds.

    python benchmarks/quality.py codec

Each run is `python recipes/train.py recipe=... strategy=gossip strategy/codec=... seed=...` with four CPU workers:
the same steps, batches and optimizer as `benchmarks/quality.py`, which compares gossip with ddp. Writes
`results/quality-codec-<hardware>.json`; finished runs are kept in it, so that a broken-off benchmark
goes on where it was; so are the runs of `benchmarks/quality.py` on the same hardware whose command is the same: its
gossip is `plain` here. `--recipes`, `--seeds` and `--variants` choose what to run next.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from rich.progress import Progress

from common.hardware import description, sentence, slug
from common.paths import RESULTS
from quality.against_ddp import ALLOWED, METRICS, train
from quality.against_ddp import VARIANTS as AGAINST_DDP

# The optimizers under which plain gossip reaches ddp, as `benchmarks/quality.py` found.
OPTIMIZERS = {"vit": [], "resnet": [], "gpt": ["optimizer=accum_adamw"]}
DIFFERENCES = ["strategy/codec=difference_compression"]
VARIANTS = {
    "plain": [],
    "int8": ["strategy/codec=int8"],
    "differences, int8": DIFFERENCES,
    "differences, top 10%, rate 0.5": [
        *DIFFERENCES, "strategy/codec@strategy.codec.inner=top_k", "strategy.combine.rate=0.5",
    ],
    "plain, rate 0.5": ["strategy.combine.rate=0.5"],
}  # fmt: skip


def taken_over(path: Path, overrides: list[str]) -> dict[str, float]:
    """The plain runs that `benchmarks/quality.py` has made by the very command of this one."""
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"runs": {}}
    if results.get("overrides", []) != overrides:
        return {}
    same = [
        (r, name)
        for r in METRICS
        for name, words in AGAINST_DDP[r].items()
        if words == ["strategy=gossip", *OPTIMIZERS[r]]
    ]
    keys = {f"{recipe} {name} {seed}": f"{recipe} plain {seed}" for recipe, name in same for seed in range(100)}
    return {keys[key]: value for key, value in results["runs"].items() if key in keys}


def table(runs: dict[str, float]) -> str:
    """Markdown: mean over the seeds and their standard deviation, against messages as they are with the same seeds."""
    head = ["recipe", "codec", "metric", "seeds", "mean ± deviation", "plain", "difference", "allowed", "within"]
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    for recipe, metric in METRICS.items():
        for variant in [v for v in VARIANTS if v != "plain"]:
            pairs = [(runs.get(f"{recipe} {variant} {s}"), runs.get(f"{recipe} plain {s}")) for s in range(100)]
            both = [(a, b) for a, b in pairs if a is not None and b is not None]
            if both:
                (value, spread), (plain, plain_spread) = (
                    _over_seeds(list(column)) for column in zip(*both, strict=True)
                )
                within = (value - plain if metric == "test/loss" else plain - value) <= ALLOWED[metric]
                cells = [recipe, variant, metric, str(len(both)), f"{value:.4f} ± {spread:.4f}"]
                cells += [f"{plain:.4f} ± {plain_spread:.4f}", f"{value - plain:+.4f}", str(ALLOWED[metric])]
                lines.append("| " + " | ".join([*cells, "yes" if within else "no"]) + " |")
    return "\n".join(lines).replace(" ± nan", "")


def _over_seeds(values: list[float]) -> tuple[float, float]:
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else float("nan")


def page(results: dict[str, Any]) -> str:
    """Markdown of what has run."""
    command = f"`python benchmarks/quality.py codec`, four CPU workers: {sentence(results['hardware'])}."
    return f"{command}\n\n{table(results['runs'])}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--recipes", nargs="+", default=list(METRICS), choices=list(METRICS))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("overrides", nargs="*", help="more words for recipes/train.py")
    options = parser.parse_args()
    path = RESULTS / f"quality-codec-{slug()}.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    runs = results.setdefault("runs", {})
    runs |= taken_over(path.parent / f"quality-{slug()}.json", options.overrides) | runs
    results |= {"hardware": description(), "overrides": options.overrides}
    order = [(r, v, seed) for v in options.variants for r in options.recipes for seed in options.seeds]
    todo = [(r, v, seed) for r, v, seed in order if f"{r} {v} {seed}" not in runs]
    with Progress() as progress:
        task = progress.add_task("runs", total=len(todo))
        for recipe, variant, seed in todo:
            progress.update(task, description=f"{recipe} {variant} seed {seed}")
            words = ["strategy=gossip", *OPTIMIZERS[recipe], *VARIANTS[variant], *options.overrides]
            runs[f"{recipe} {variant} {seed}"] = train(recipe, seed, words)
            path.write_text(json.dumps(results, indent=1))
            progress.advance(task)
    path.write_text(json.dumps(results, indent=1))
    print(page(results))
