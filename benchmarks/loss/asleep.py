"""Seconds of a step in `loss/per_second.py --asleep`: hosts whose accelerators are sleeps.

Forward and backward sleep `--step-seconds` for a batch of the recipe's own size, and as many times longer for a larger
one. Parameters, gradients, hooks, codecs, mixing, the optimizer's own work, Lightning's loop and the network are real.
Time is stretched so that each host has `--share` of a core: on two cores, with half a core a host, sleeps of eight
hosts take twice as long and links have half the rate, and what is measured is halved. Hosts have priority over other
work. A row is timed again, `--turns` times at most, where that took more than `--quiet` of a core; kept are what it
took, what a host computes, and how long it waited for a processor.

Losses are those of `loss/per_second.py`, by the same steps. What a sleep stands for: `loss/asleep_tables.py`.
Needs root and iproute2. Writes `results/loss-per-second-asleep-<hardware>.json`.
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.hardware import description
from common.paths import command
from loss.per_second import METHODS, recipe_for
from network.accuracy import WARM_UP, Recipe
from network.cluster import Cluster, bits_per_second, cluster
from network.speed import busy_per_step, seconds_per_step

LONGER = {"gpt-1024-tokens": 4}
"""Recipes with batches so many times as large as those of the first of its model."""
STEPS, ALONE = WARM_UP + 8, WARM_UP + 16
"""Steps of a method, of which the last eight are timed: a whole outer round; and of hosts that send nothing."""
QUIET, TURNS = 0.1, 3
ALONE_WORDS = ["optimizer=muon"]
"""What hosts that send nothing train with: the strongest `ddp`'s own."""


def stretched(hosts: int, share: float) -> float:
    """Return how many times longer everything takes, so that each host has that share of a core; 1 where it has."""
    return max(1.0, share * hosts / (os.cpu_count() or 1))


def slower(rate: str, times: float) -> str:
    """Return the rate of a link on which time passes so many times slower, in tc's words."""
    return f"{bits_per_second(rate) / times / 1e3:.0f}kbit"


def launched(
    place: Cluster, recipe: Recipe, rates: dict[str, dict[str, list[str]]], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Records of every host, of the run alone first, then of each turn of each method at each rate."""
    plan = {"words": recipe.words, "rates": rates, "hosts": place.hosts, "cluster": place.name, "seed": 0}
    plan |= {"steps": STEPS, "every": STEPS, "alone_steps": ALONE, "alone": ALONE_WORDS, "warm_up": WARM_UP}
    plan |= {"asleep": recipe.asleep, "own_update": True, "quiet": options.quiet, "turns": options.turns}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "plan.json").write_text(json.dumps(plan))
        codes = place.run([*command("loss", "asleep_worker"), name], seconds=options.longest)
        files = {int(path.stem.split("-")[0]): path for path in folder.glob("[0-9]*-0.json")}
        turns = [[folder / f"{turn}-{host}.json" for host in range(place.hosts)] for turn in sorted(files)]
        whole = [paths for paths in turns if all(path.exists() for path in paths)]
        rows = [[json.loads(path.read_text()) for path in paths] for paths in whole]
        if any(codes):
            print(f"{place.hosts} hosts ended with {codes} after {len(rows)} runs: those are kept")
        alone = [json.loads((folder / f"alone-{host}.json").read_text()) for host in range(place.hosts)]
    return [{"alone": alone}, *({"hosts": of} for of in rows if "others" in of[0])]


def timed(records: list[dict[str, Any]], times: float) -> dict[str, Any]:
    """{method: its row}: of several turns the one in which other work took least."""
    found: dict[str, Any] = {}
    for record in records:
        of = record["hosts"]
        row = {
            "seconds": seconds_per_step([one["ends"] for one in of], WARM_UP) / times,
            "busy": busy_per_step([one["busy"] for one in of], WARM_UP) / times,
            "waited": busy_per_step([one["waited"] for one in of], WARM_UP) / times,
            "others": round(of[0]["others"], 3),
            "sent": of[0]["sent"],
            "turns": found.get(of[0]["method"], {}).get("turns", 0) + 1,
        }
        if of[0]["method"] in found and found[of[0]["method"]]["others"] <= row["others"]:
            row = {**found[of[0]["method"]], "turns": row["turns"]}
        found[of[0]["method"]] = row
    return found


def measure(options: argparse.Namespace, results: dict[str, Any]) -> Iterator[str]:
    """Time what isn't kept yet, all of a recipe in one launch; yield what it was."""
    for name in options.recipes:
        times, place = stretched(options.hosts, options.share), f"{name} {options.hosts}"
        recipe = recipe_for(name, options.hosts, options.methods)
        recipe = recipe._replace(asleep=options.step_seconds * LONGER.get(name, 1) * times)
        left: dict[str, dict[str, list[str]]] = {}
        for rate in options.rates:
            known = results["rows"].get(f"{place} {rate}", {})
            of = {method: words for method, words in recipe.methods.items() if method not in known}
            left |= {slower(rate, times): of} if of else {}
        if not left:
            continue
        load = os.getloadavg()[0]
        with cluster(options.hosts, next(iter(left)), name="asleep") as where:
            alone, *records = launched(where, recipe, left, options)
        seconds = statistics.mean(seconds_per_step([row], WARM_UP) for row in alone["alone"]) / times
        seconds = min(seconds, results["places"].get(place, {}).get("alone", seconds))  # of an earlier launch
        about = {"alone": seconds, "sleep": options.step_seconds * LONGER.get(name, 1), "stretched": times}
        results["places"][place] = about | {"load before": round(load, 2), "share": options.share}
        for rate in options.rates:
            here = [one for one in records if one["hosts"][0]["rate"] == slower(rate, times)]
            merged = {**results["rows"].get(f"{place} {rate}", {}), **timed(here, times)}
            if merged:
                results["rows"][f"{place} {rate}"] = {name: merged[name] for name in METHODS if name in merged}
        yield place


def time_asleep(options: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Return all that has been measured, this command's rows with it."""
    results: dict[str, Any] = {"places": {}, "rows": {}}
    if path.exists():
        results = json.loads(path.read_text())
    for _ in measure(options, results) if not options.tables else ():
        results["hardware"] = description()
        path.write_text(json.dumps(results, indent=1) + "\n")
    return results
