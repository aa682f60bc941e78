"""Rehearsed steps times forecast seconds against real seconds to a loss.

    python benchmarks/rehearse.py compared                  # rehearses; some thirty minutes, a busy machine will do
    sudo python benchmarks/rehearse.py compared --forecast  # profiles, forecasts and real steps; a quiet hour
    sudo python benchmarks/rehearse.py compared --asleep    # the same with simulated accelerators; half an hour

Real losses of `gpt` on four hosts, with 256 and 1,024 tokens a worker, are those of `loss/per_second.py` (committed).
Those of two hosts, which have a processor each, are measured here, by the same whole runs. The same settings are
rehearsed for the first steps of the same schedule and the same seed, on the same test examples. Methods with a hook of
torch's or of another package can't be forecast and are left out. Seconds: `rehearse/seconds.py`, where hosts compute
on the processors that they share, and `rehearse/asleep.py`, where accelerators are simulated; losses are the same.

What was measured is kept and not measured again; take it out of the results for that.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from rich.console import Console
from rich.progress import track
from torch.utils.data import DataLoader, Subset

from common.hardware import description, slug
from common.paths import RESULTS
from common.quiet_recipe import built, composed
from lightning_decentral.planner.rehearsal.crew import Crew
from lightning_decentral.planner.rehearsal.evaluation import HeldOutEvaluation
from lightning_decentral.planner.rehearsal.loop_settings import LoopSettings
from lightning_decentral.planner.rehearsal.search import MARKS, Point, SearchCourse, reached, search, smoothed
from lightning_decentral.planner.rehearsal.worker import copies_of, data_of
from network.accuracy import EXAMPLES, Recipe
from rehearse import asleep
from rehearse.seconds import HOSTS, METHODS_HERE, PLACES, RATES, REAL, RECIPES, SEED, Place, forecasts, measure

WITHIN, ALIKE = 0.15, 0.1
"""Forecast seconds are right if not farther off; of methods nearer to each other none is the best."""
SHORT = 0.025
"""Seconds of a step that a processor's turns lengthen: counted apart."""


def crew_of(
    recipe: Recipe, words: list[str], strategy: Any = None, hosts: int = HOSTS
) -> tuple[Any, Any, Callable[[float], Crew]]:
    """(module, data, what makes the crew at a learning rate)."""
    cfg = composed([*recipe.words, *words], SEED)
    data, module, _ = built(cfg)
    batches = copies_of(data_of(data))
    used = strategy or instantiate(cfg.strategy, _convert_="all")

    def make(rate: float) -> Crew:
        loop = LoopSettings(cfg.trainer.gradient_clip_val, rate, recipe.steps)
        return Crew(module, batches, used, hosts, recipe.steps, loop=loop)

    return module, data, make


def curve(place: Place, words: list[str]) -> list[Point]:
    """(step, test loss) of a method, rehearsed."""
    module, data, make = crew_of(RECIPES[place.recipe], words, hosts=place.hosts)
    data.setup("test")
    tests = DataLoader(Subset(data.splits["test"], range(EXAMPLES)), batch_size=EXAMPLES // 4)
    course = SearchCourse(place.steps, 0.0, HeldOutEvaluation(module, list(tests)), lambda: None)
    return list(search(make, [1.0], course).points)


def compared(kept: dict[str, Any]) -> dict[str, Any]:
    """Rows of each place, rate, target and method, and how many are right."""
    rows = []
    for place, rate in product(PLACES, RATES):
        runs = real_runs(place, kept)
        took, told = kept["real_seconds"].get(f"{place.key} {rate}", {}), kept["forecasts"][place.key][rate]
        for target, (method, points) in product(place.targets, kept["curves"][place.key].items()):
            steps = reached(points, target), reached(runs.get(method, []), target)
            if method in took and steps[0] is not None and steps[1] is not None:
                row = {"place": place.key, "rate": rate, "target": target, "method": method, "steps": steps}
                row["step_seconds"] = told[method], took[method]
                row["seconds"] = steps[0] * told[method], steps[1] * took[method]
                rows.append(row)
    short = [row for row in rows if row["step_seconds"][1] < SHORT]
    long = [row for row in rows if row["step_seconds"][1] >= SHORT]
    return {"rows": rows, **verdict(rows), "short": verdict(short) if short else None, "long": verdict(long)}


def real_runs(place: Place, kept: dict[str, Any]) -> dict[str, list[Point]]:
    """{method: (step, loss)}, smoothed as a rehearsal's where marks are as near to each other."""
    committed = json.loads(REAL.read_text())["curves"].get(f"{place.key} {SEED}")
    found = {}
    for method, run in (committed or kept["real_curves"][place.key]).items():
        points = [*zip(run["steps"], run["scores"], strict=True)]
        found[method] = smoothed(points) if run["steps"][0] == place.steps // MARKS else points
    return found


def verdict(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how many seconds and steps are right, in how many settings the best is the best, how many pairs are in
    order.
    Pairs are counted twice: all, and those with as large a difference as a setting's two best must have."""
    found = {"settings": 0, "clear": 0, "best_right": 0, "pairs": 0, "pairs_right": 0, "apart": 0, "apart_right": 0}
    for setting in dict.fromkeys((row["place"], row["rate"], row["target"]) for row in rows):
        here = [row for row in rows if (row["place"], row["rate"], row["target"]) == setting]
        found["settings"] += 1
        first, *others = sorted(here, key=lambda row: row["seconds"][1])
        second = others[0] if others else first
        if second["seconds"][1] > (1 + ALIKE) * first["seconds"][1]:
            found["clear"] += 1
            found["best_right"] += min(here, key=lambda row: row["seconds"][0]) is first
        for a, b in combinations((row["seconds"] for row in here), 2):
            right = (a[0] < b[0]) == (a[1] < b[1])
            found["pairs"] += 1
            found["pairs_right"] += right
            if max(a[1], b[1]) > (1 + ALIKE) * min(a[1], b[1]):
                found["apart"] += 1
                found["apart_right"] += right
    for what in ("seconds", "steps", "step_seconds"):
        off = [abs(row[what][0] / row[what][1] - 1) for row in rows]
        found[f"{what}_within"] = sum(one <= WITHIN for one in off)
        found[f"{what}_median_off"] = round(statistics.median(off), 4)
    return found | {"values": len(rows)}


def page(found: dict[str, Any]) -> str:
    lines = ["| recipe, hosts, rate | method | target | s forecast | real s | off | steps | real | s a step | real |"]
    lines.append("| --- " * 10 + "|")
    for row in found["rows"]:
        (told, took), (mine, theirs), (step, real) = row["seconds"], row["steps"], row["step_seconds"]
        cells = [
            f"{row['place'].replace(' ', ', ')}, {row['rate']}",
            row["method"],
            f"{row['target']}",
            f"{told:.1f}",
            f"{took:.1f}",
        ]
        cells += [f"{100 * (told / took - 1):+.0f} %", f"{mine}", f"{theirs}", f"{step:.3f}", f"{real:.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    parts = {"all": found}
    if found["short"] is not None:
        parts |= {f"steps of {SHORT:g} s or longer": found["long"], "shorter ones": found["short"]}
    said = "\n\n".join(_said(what, part) for what, part in parts.items())
    return "\n".join([*lines, "", said]) + "\n"


def _said(what: str, found: dict[str, Any]) -> str:
    said = f"Of {what}, {found['seconds_within']} of {found['values']} seconds are within {WITHIN:.0%}, "
    said += f"{found['steps_within']} numbers of steps, {found['step_seconds_within']} seconds of a step. "
    said += f"The best one is right in {found['best_right']} of {found['clear']} settings where the two best differ by "
    said += f"more than {ALIKE:.0%}, of {found['settings']} in all; the order in {found['pairs_right']} of "
    return f"{said}{found['pairs']} pairs, in {found['apart_right']} of the {found['apart']} that are as far apart."


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.exists() else {}


def compare_asleep() -> None:
    """Seconds with simulated accelerators; losses by steps are those of `rehearse/compared.py` without arguments."""
    path = RESULTS / f"rehearsed-asleep-{slug()}.json"
    losses = {what: read(RESULTS / f"rehearsed-{slug()}.json")[what] for what in ("curves", "real_curves")}
    kept = read(path)
    for what in asleep.measure(both := kept | losses):
        kept = {name: part for name, part in both.items() if name not in losses}
        path.write_text(json.dumps(kept, indent=1) + "\n")
        Console().print(what)
    both["forecasts"] = asleep.forecasts(both)
    kept |= {"forecasts": both["forecasts"], **compared(both), "hardware": description()}
    path.write_text(json.dumps(kept, indent=1) + "\n")
    Console().print(page(kept))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--forecast", action="store_true", help="profiles, forecasts and real steps; needs root")
    parser.add_argument("--asleep", action="store_true", help="the same with simulated accelerators; needs root")
    options = parser.parse_args()
    if options.asleep:
        compare_asleep()
        return
    path = RESULTS / f"rehearsed-{slug()}.json"
    kept = read(path)
    if options.forecast:
        for what in measure(kept):
            path.write_text(json.dumps(kept, indent=1) + "\n")
            Console().print(what)
        kept["forecasts"] = forecasts(kept)
    else:
        torch.set_num_threads(1)
        curves = kept.setdefault("curves", {})
        todo = [(place, method) for place, method in product(PLACES, METHODS_HERE)]
        for place, method in track([one for one in todo if one[1] not in curves.get(one[0].key, {})], "methods"):
            curves.setdefault(place.key, {})[method] = curve(place, METHODS_HERE[method])
            path.write_text(json.dumps(kept, indent=1) + "\n")
    if "forecasts" in kept:
        kept |= compared(kept)
        Console().print(page(kept))
    path.write_text(json.dumps({**kept, "hardware": description()}, indent=1) + "\n")
