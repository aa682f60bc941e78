"""Rehearsed steps and seconds to a loss against real runs of the same settings, and what a rehearsal computes.

    python benchmarks/rehearsed.py            # about six minutes on two cores
    python benchmarks/rehearsed.py --cost     # one minute

Real runs are those of `loss_per_second.py` (committed): `gpt` on four hosts. The same settings are rehearsed for the
first steps of the same schedule and the same seed, on the same test examples. Seconds to a loss are steps to it, real
or rehearsed, times the measured seconds of a step at each rate: the forecast of a step is checked by `predicted.py`.
Methods with a hook of torch's can't be rehearsed and are left out.

The cost is processor time, which other programs don't change: of all threads over whole steps, against forward and
backward alone, one torch thread.
"""

import argparse
import json
import time
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from cluster_accuracy import EXAMPLES
from hardware import description, slug
from hydra.utils import instantiate
from loss_per_second import METHODS, RECIPES
from quiet_recipe import built, composed
from rich.console import Console
from rich.progress import track
from torch.utils.data import DataLoader, Subset

from lightning_decentral.planner.forecasts import strategy_of
from lightning_decentral.planner.rehearsal.batches import loader_of, shared_out
from lightning_decentral.planner.rehearsal.crew import Crew
from lightning_decentral.planner.rehearsal.evaluation import Evaluation
from lightning_decentral.planner.rehearsal.rehearse import METHODS as REHEARSED
from lightning_decentral.planner.rehearsal.search import Course, Point, reached, search
from lightning_decentral.planner.rehearsal.worker import Loop

RESULTS = Path(__file__).parent / "results"
REAL = RESULTS / "loss-per-second-2-cores.json"
SEED, HOSTS, STEPS, RECIPE = 0, 4, 320, RECIPES["gpt"]
TARGETS = (2.3, 2.1, 1.95)
COST_STEPS = 30


def crew_of(words: list[str], strategy: Any = None) -> tuple[Any, Any, Callable[[float], Crew]]:
    """(module, data, what makes the crew at a learning rate)."""
    cfg = composed([*RECIPE.words, *words], SEED)
    data, module, _ = built(cfg)
    batches, epoch = shared_out(loader_of(module, data), HOSTS)
    used = strategy or instantiate(cfg.strategy, _convert_="all")

    def make(rate: float) -> Crew:
        loop = Loop(cfg.trainer.gradient_clip_val, rate, epoch, RECIPE.steps)
        return Crew(module, batches, used, HOSTS, RECIPE.steps, loop=loop)

    return module, data, make


def curve(words: list[str]) -> list[Point]:
    """(step, test loss) of a method, rehearsed."""
    module, data, make = crew_of(words)
    data.setup("test")
    tests = DataLoader(Subset(data.splits["test"], range(EXAMPLES)), batch_size=EXAMPLES // 4)
    course = Course(STEPS, 0.0, Evaluation(module, list(tests)), lambda: None)
    return list(search(make, [1.0], course).points)


def shares() -> dict[str, float]:
    """{method: processor time of steps over that of forward and backward}."""
    torch.set_num_threads(1)
    return {one.title: _share(one.words) for one in track(REHEARSED, "cost")}


def _share(words: str) -> float:
    _, _, make = crew_of([], strategy_of(words))
    with make(1.0) as crew:
        crew.train(3)
        needed = [_counted(worker.module) for worker in crew.workers]
        begun = time.process_time()
        crew.train(COST_STEPS)
        return (time.process_time() - begun) / sum(map(sum, needed))


def _counted(module: Any) -> list[float]:
    """Seconds of each forward and backward from now on."""
    forward, found = module.training_step, []

    def step(*batch: Any) -> torch.Tensor:
        begun = time.process_time()
        loss = forward(*batch)
        backward = loss.backward

        def timed() -> None:
            start = time.process_time()
            backward()
            found.append(time.process_time() - start)

        loss.backward = timed
        found.append(time.process_time() - begun)
        return loss  # type: ignore[no-any-return]

    module.training_step = step
    return found


def compared(curves: dict[str, list[Point]]) -> dict[str, Any]:
    """Rows of each method, rate and target; how many pairs have the real order, and how often the best is the best."""
    real = json.loads(REAL.read_text())
    runs = real["curves"][f"gpt {HOSTS} {SEED}"]
    rates = {k.split()[2]: v for k, v in real["seconds"].items() if k.startswith(f"gpt {HOSTS} ")}
    rows, right, pairs, best, groups = [], 0, 0, 0, 0
    for rate, step_seconds in rates.items():
        for target in TARGETS:
            here = {}
            for method, points in curves.items():
                marks = list(zip(runs[method]["steps"], runs[method]["scores"], strict=True))
                steps = reached(points, target), reached(marks, target)
                if None not in steps:
                    here[method] = tuple(count * step_seconds[method] for count in steps)
                    rows.append({"rate": rate, "target": target, "method": method, "steps": steps})
                    rows[-1]["seconds"] = here[method]
            groups, best = groups + 1, best + (_soonest(here, 0) == _soonest(here, 1))
            for a, b in combinations(here.values(), 2):
                pairs, right = pairs + 1, right + ((a[0] < b[0]) == (a[1] < b[1]))
    return {"rows": rows, "pairs": pairs, "pairs_right": right, "settings": groups, "best_right": best}


def _soonest(here: dict[str, tuple[float, ...]], which: int) -> str:
    return min(here, key=lambda method: here[method][which])


def page(found: dict[str, Any]) -> str:
    lines = ["| method | target | steps rehearsed | steps of the real run | off |", "| --- | --- | --- | --- | --- |"]
    told = dict.fromkeys((row["method"], row["target"], *row["steps"]) for row in found["rows"])
    for method, target, mine, theirs in told:
        lines.append(f"| {method} | {target} | {mine} | {theirs} | {100 * (mine / theirs - 1):+.1f} % |")
    lines += ["", f"Order right in {found['pairs_right']} of {found['pairs']} pairs of methods at a rate and target; "]
    lines[-1] += f"the best one right in {found['best_right']} of {found['settings']} settings."
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cost", action="store_true", help="what a rehearsal computes, in place of the comparison")
    options = parser.parse_args()
    path = RESULTS / f"rehearsed-{slug()}.json"
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if options.cost:
        kept["cost"] = shares()
        Console().print(kept["cost"])
    else:
        torch.set_num_threads(1)
        methods = {name: words for name, words in METHODS.items() if not any(w.startswith("hook=") for w in words)}
        kept["curves"] = {name: curve(words) for name, words in track(methods.items(), "methods")}
        kept |= compared(kept["curves"])
        path.with_suffix(".md").write_text(page(kept))
        Console().print(page(kept))
    path.write_text(json.dumps({**kept, "hardware": description()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
