"""Learning rate and momentum of each method of `loss/per_second.py`, all from one grid.

    sudo nice python benchmarks/loss.py tuning --jobs 2                     # an hour and a half on two cores
    nice python benchmarks/loss.py tuning --jobs 2 --recipe vit             # a quarter of that; resnet, larger-gpt, too

Each run is a rehearsal: four workers in one process, bit for bit what so many processes train (`docs/plan.md`), over
one epoch of `gpt`, or as many steps as `loss/per_second.py` has of another recipe, under a cosine of that length. What
can't be rehearsed (`loss/rehearsed.py`) is tuned for `gpt`, on processes in namespaces, which need root and iproute2.
Judged by the test loss of the mean model after the last step. No network and no clock matters, so a busy machine will
do. Muon has three momenta, Adam's stay at 0.9.

Writes `results/tuning-<hardware>.json`, or `tuning-<recipe>-<hardware>.json`; finished runs are kept in
it.
"""

import argparse
import json
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from itertools import product
from math import isfinite
from multiprocessing import get_context
from typing import Any

from rich.progress import track

from common.hardware import description, sentence, slug
from common.paths import RESULTS
from loss.methods import METHODS, MOMENTA, RATES, best, family, plain, tuned_alone
from loss.per_second import RECIPES, real_curve
from loss.rehearsed import can_be_rehearsed, rehearsed

WORKERS, STEPS, SEED = 4, 364, 0
LONGEST = 600.0
"""Seconds after which processes have failed."""


def grid(recipe: str = "gpt") -> dict[str, list[str]]:
    """{"method | rate | momentum": words}; without those that take another's."""
    found = {}
    for method, words in METHODS.items():
        if tuned_alone(method) and (recipe == "gpt" or (can_be_rehearsed(words) and plain(method) == method)):
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
    once = RECIPES[recipe]._replace(steps=steps, every=steps, methods={"": words})
    real = partial(real_curve, workers, once, "", seed, LONGEST)
    try:
        found = rehearsed(once, words, workers, seed) if can_be_rehearsed(words) else real()
    except FloatingPointError:
        return float("inf")
    reached = float(found["scores"][-1])
    return reached if isfinite(reached) else float("inf")


def steps_of(recipe: str) -> int:
    """Return the steps of a run: one epoch of `gpt`, another recipe's own."""
    return STEPS if recipe == "gpt" else RECIPES[recipe].steps


def page(kept: dict[str, Any]) -> str:
    """Markdown, a table for each kind of optimizer: columns are rates."""
    recipe = next((recipe for recipe in RECIPES if kept["name"].startswith(f"tuning-{recipe}-")), "gpt")
    runs, hardware = kept["runs"], sentence(kept["hardware"])
    if "also on" in kept:
        hardware += f"; some on {' and '.join(kept['also on'])}"
    head = f"Test loss of `{recipe}` after {steps_of(recipe)} steps, {WORKERS} workers, seed {SEED}: {hardware}."
    parts, chosen = [head], best(runs)
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
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), help="default: all")
    options = parser.parse_args()
    recipe: str = options.recipe
    path = RESULTS / f"tuning-{slug()}.json" if recipe == "gpt" else RESULTS / f"tuning-{recipe}-{slug()}.json"
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"runs": {}}
    asked = {
        name: words for name, words in grid(recipe).items() if not options.methods or _method(name) in options.methods
    }
    todo = {name: words for name, words in asked.items() if name not in kept["runs"]}

    def keep(name: str, reached: float) -> None:
        kept["runs"][name], here = reached, description()
        if kept.setdefault("hardware", here)["processor"] != here["processor"]:
            kept["also on"] = sorted({*kept.get("also on", []), here["processor"]})
        path.write_text(json.dumps(kept, indent=1) + "\n")

    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        alone = {name: words for name, words in todo.items() if can_be_rehearsed(words)}
        running = {pool.submit(last_loss, recipe, words): name for name, words in alone.items()}
        for done in track(as_completed(running), "rehearsals", total=len(running)):
            keep(running[done], done.result())
    for name in track([*todo.keys() - alone.keys()], "runs on processes"):
        keep(name, last_loss(recipe, todo[name]))
    kept["runs"] = {name: kept["runs"][name] for name in grid(recipe) if name in kept["runs"]}
    path.write_text(json.dumps(kept, indent=1) + "\n")
    print(page({**kept, "name": path.stem}))
