"""Learning rate and momentum of each method of `loss_per_second.py`, all from one grid.

    nice python benchmarks/tuning.py --jobs 2                          # about an hour on two cores
    nice python benchmarks/tuning.py --jobs 2 --recipe vit             # a quarter of that; resnet, larger-gpt, too

Each run is a rehearsal: four workers in one process, bit for bit what so many processes train (`docs/plan.md`), over
one epoch of `gpt`, or as many steps as `loss_per_second.py` has of another recipe, under a cosine of that length.
Judged by the test loss of the mean model after the last step. No network and no clock matters, so a busy machine will
do. Muon has three momenta, Adam's stay at 0.9.

Writes `results/tuning-<hardware>.json`, or `tuning-<recipe>-<hardware>.json`, and `.md`; finished runs are kept in the
first.
"""

import argparse
import json
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from math import isfinite
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from hardware import description, sentence, slug
from loss_methods import METHODS, MOMENTA, RATES, best, family
from loss_per_second import RECIPES
from losses import can_be_rehearsed, rehearsed
from rich.progress import track

RESULTS = Path(__file__).parent / "results"
WORKERS, STEPS, SEED = 4, 364, 0


def grid() -> dict[str, list[str]]:
    """{"method | rate | momentum": words}; what has a hook of torch's takes what `ddp` takes."""
    found = {}
    for method, words in METHODS.items():
        if can_be_rehearsed(words) and not any(word.startswith("hook=") for word in words):
            for rate, momentum in product(RATES[family(method)], MOMENTA[family(method)]):
                own = [f"optimizer.momentum={momentum}"] if family(method) == "muon" else []
                found[f"{method} | {rate:g} | {momentum:g}"] = [*words, f"optimizer.lr={rate:g}", *own]
    return found


def _method(name: str) -> str:
    return name.partition(" | ")[0]


def last_loss(
    recipe: str, words: list[str], workers: int = WORKERS, steps: int | None = None, seed: int = SEED
) -> float:
    """Test loss at the end, by the recipe's own score; infinite where it is no number or the run broke off."""
    steps = steps or steps_of(recipe)
    try:
        found = rehearsed(RECIPES[recipe]._replace(steps=steps, every=steps), words, workers, seed)
    except FloatingPointError:
        return float("inf")
    reached = float(found["scores"][-1])
    return reached if isfinite(reached) else float("inf")


def steps_of(recipe: str) -> int:
    """Of a run: one epoch of `gpt`, another recipe's own."""
    return STEPS if recipe == "gpt" else RECIPES[recipe].steps


def page(recipe: str, steps: int, runs: dict[str, float]) -> str:
    """A table for each kind of optimizer: columns are rates."""
    parts, chosen = (
        [f"Test loss of `{recipe}` after {steps} steps, {WORKERS} workers, seed {SEED}: {sentence()}."],
        best(runs),
    )
    for kind, rates in RATES.items():
        of_kind = [method for method in chosen if family(method) == kind]
        if not of_kind:
            continue
        head = ["method", "momentum", *(f"{rate:g}" for rate in rates)]
        lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
        for method, momentum in product(of_kind, MOMENTA[kind]):
            cells = []
            for rate in rates:
                reached = runs.get(f"{method} | {rate:g} | {momentum:g}")
                bold = "**" if (reached, rate, momentum) == chosen[method] else ""
                cells.append("" if reached is None else f"{bold}{reached:.3f}{bold}")
            lines.append(f"| {method} | {momentum:g} | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, of one thread each")
    parser.add_argument("--recipe", choices=["gpt", "larger-gpt", "vit", "resnet"], default="gpt")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), help="default: all that can be rehearsed")
    options = parser.parse_args()
    recipe: str = options.recipe
    path = RESULTS / f"tuning-{slug()}.json" if recipe == "gpt" else RESULTS / f"tuning-{recipe}-{slug()}.json"
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"runs": {}}
    asked = {name: words for name, words in grid().items() if not options.methods or _method(name) in options.methods}
    todo = {name: words for name, words in asked.items() if name not in kept["runs"]}
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(last_loss, recipe, words): name for name, words in todo.items()}
        for done in track(as_completed(running), "runs", total=len(running)):
            kept["runs"][running[done]] = done.result()
            kept["hardware"] = description()
            path.write_text(json.dumps(kept, indent=1) + "\n")
    kept["runs"] = {name: kept["runs"][name] for name in grid() if name in kept["runs"]}
    path.write_text(json.dumps(kept, indent=1) + "\n")
    text = page(recipe, steps_of(recipe), kept["runs"])
    path.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
