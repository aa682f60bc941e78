"""Seconds to a loss on slow networks: gossip, codes and outer rounds with Muon against the strongest forms of `ddp`.

    sudo python benchmarks/loss.py per_second --recipes gpt --seeds 0 1 2 --rates 10mbit 50mbit 200mbit 1gbit
    sudo python benchmarks/loss.py per_second --asleep --recipes gpt --hosts 8  # accelerators sleep: `loss/asleep.py`

Hosts are network namespaces (`cluster.py`); computation, messages and losses are real, on processors that all hosts
share. A loss after so many steps doesn't depend on the network, so it is measured once, whole runs with every seed: by
a rehearsal (`loss/rehearsed.py`), or over links that hide nothing and delay nothing where a method can't be rehearsed.
A step is timed at each rate, over some tens of steps. Seconds to a loss are the one times the other. Rates and momenta
are each method's best on one grid (`loss/tuning.py`), by seed 0; with the half-precision hook those without it, shared
out Muon those of the same without. `sympy` has those of `gpt`, and `larger-gpt` where its own grid has none.
`--schedules` trains in other numbers of steps, which its cosine ends with: ours are cheap, and may end lower and still
be faster to a loss.

Writes `results/loss-per-second-<hardware>.json`; what is in it isn't measured again. Timing needs root
and iproute2; `--rates` and `--seeds` without values leave that part out. `--tables` writes the page again.
"""

import argparse
import json
from concurrent.futures import ProcessPoolExecutor, as_completed
from math import gcd
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from rich.progress import track

from common.hardware import description, slug
from common.paths import RESULTS
from loss.methods import METHODS, tuned
from loss.rehearsed import can_be_rehearsed, rehearsed
from loss.tables import page, scheduled
from network.accuracy import CROSS_ENTROPY, WARM_UP, Recipe, measure
from network.accuracy import RECIPES as PLAIN_RECIPES
from network.cluster import cluster

GPT = PLAIN_RECIPES["gpt"]
# In 256 tokens a worker and step Muon's products cost as much as the rest; in 1,024 about a quarter of that.
LARGER_BATCH = GPT._replace(words=[*GPT.words, "data.batch_size=16"], steps=280, every=8)
ON_DIGITS = PLAIN_RECIPES["resnet"]._replace(steps=300, every=20, score=CROSS_ENTROPY, sign=-1, methods=METHODS)
RECIPES = {
    "gpt": GPT._replace(methods=METHODS),
    "gpt-1024-tokens": LARGER_BATCH._replace(methods=METHODS),
    "larger-gpt": PLAIN_RECIPES["larger-gpt"]._replace(methods=METHODS),
    "sympy": GPT._replace(words=[*GPT.words, "data=package_text"], methods=METHODS),
    "vit": ON_DIGITS._replace(words=["recipe=vit"]),
    "resnet": ON_DIGITS,
}
HALF = {"steps": 540, "every": 20}
HALF_WIDE = {"steps": 144, "every": 8}
STEPS = {
    **{("gpt", hosts): HALF for hosts in (8, 16)},
    **{("gpt-1024-tokens", hosts): HALF_WIDE for hosts in (8, 16)},
}
"""On more hosts: at 8 the examples of 1,080 steps on 4, or of 288, with marks that end at the last step."""
FASTER = {"gossip, int8, Muon": ["optimizer.lr=3e-2"]}
ON_FOUR = {
    "ddp, Muon, fp16 hook, accumulating 4": ["optimizer.lr=3e-2"],
    "gossip, int8, Muon and its momentum": ["optimizer.lr=2e-2"],
}
TUNED: dict[tuple[str, int], dict[str, list[str]]] = {("gpt", 4): ON_FOUR, ("gpt", 8): FASTER, ("gpt", 16): FASTER}
"""Words beside a method's own, by recipe and hosts."""
FREE = "10gbit"
"""Links for the losses: no method waits for them."""
TIMED = {"10mbit": 26, "50mbit": 50}
MANY = 8
"""Steps that are run, elsewhere 74, and 26 on so many hosts. Timed are those after the tenth, a multiple of the outer
rounds' 8."""


def options_of(steps: int | None, longest: float) -> argparse.Namespace:
    return argparse.Namespace(steps=steps, longest=longest)


def recipe_for(name: str, hosts: int, methods: list[str] | None = None) -> Recipe:
    """Return the recipe with the steps and overrides for this number of hosts; `gpt-1440-steps` has a schedule of that
    length."""
    name, steps = scheduled(name)
    found, more = RECIPES[name], TUNED.get((name, hosts), {})
    if (rates := RESULTS / f"tuning-{name}-{slug()}.json").exists():
        more = tuned(json.loads(rates.read_text())["runs"])
    words = {m: [*own, *more.get(m, [])] for m, own in found.methods.items() if methods is None or m in methods}
    found = found._replace(methods=words, **STEPS.get((name, hosts), {}))
    return found._replace(steps=steps, every=gcd(steps, found.every)) if steps else found


def real_curve(hosts: int, recipe: Recipe, method: str, seed: int, longest: float) -> dict[str, Any]:
    """{"steps", "scores", "bytes_sent", ...} of a whole run on processes."""
    alone = recipe._replace(methods={method: recipe.methods[method]})
    with cluster(hosts, FREE, name="losses") as place:
        return dict(measure(place, alone, options_of(None, longest), seed)["methods"][method])


def seconds(hosts: int, recipe: Recipe, rate: str, longest: float) -> dict[str, float]:
    """{method: seconds per step at the rate}."""
    steps = TIMED.get(rate, 74) if hosts < MANY else TIMED["10mbit"]
    with cluster(hosts, rate, name="seconds") as place:
        found = measure(place, recipe._replace(every=steps), options_of(steps, longest), 0, WARM_UP + 2)["methods"]
    return {method: run["seconds_per_step"] for method, run in found.items()}


def about(results: dict[str, Any], timed: bool) -> None:
    """Notes what it is measured on: `hardware` is that of the seconds, losses may come from another machine."""
    here = description()
    other = results.get("hardware", here)["processor"] != here["processor"]
    if timed and other and results["seconds"]:
        raise SystemExit(f"the seconds there are of {results['hardware']['processor']}: give --results another file")
    if timed or "hardware" not in results:
        results["hardware"] = here
    elif other:
        results["losses also on"] = sorted({*results.get("losses also on", []), here["processor"]})


Key = tuple[str, str, str]
"""Kind of result, place in it, method."""


def keep(results: dict[str, Any], path: Path, key: Key, found: Any) -> None:
    """Write the result at its place among the methods to the disk."""
    kind, place, method = key
    known = {**results[kind].get(place, {}), method: found}
    order = [*RECIPES[scheduled(place.partition(" ")[0])[0]].methods]
    results[kind][place] = dict(sorted(known.items(), key=lambda item: order.index(item[0])))
    path.write_text(json.dumps(results, indent=1) + "\n")


def time_steps(options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Time steps of the methods that have no result yet, all at a rate in one launch."""
    for rate, name in track([(rate, name) for name in options.recipes for rate in options.rates], "seconds"):
        recipe, place = recipe_for(name, options.hosts, options.methods), f"{name} {options.hosts} {rate}"
        known = results["seconds"].get(place, {})
        left = {method: words for method, words in recipe.methods.items() if method not in known}
        if left:
            found = seconds(options.hosts, recipe._replace(methods=left), rate, options.longest)
            for method, value in found.items():
                keep(results, options.results, ("seconds", place, method), value)


def train(options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Whole runs of the methods that aren't there yet; rehearsals in so many processes at once."""
    todo: dict[Key, tuple[Recipe, list[str], int, int]] = {}
    names = [f"{name}-{steps}-steps" for name in options.recipes for steps in options.schedules] or options.recipes
    for seed in options.seeds:
        for name in names:
            recipe, place = recipe_for(name, options.hosts, options.methods), f"{name} {options.hosts} {seed}"
            for method, words in recipe.methods.items():
                if method not in results["curves"].get(place, {}):
                    todo["curves", place, method] = recipe, words, options.hosts, seed
    alone = {key: run for key, run in todo.items() if can_be_rehearsed(run[1])}
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        running = {pool.submit(rehearsed, *run): key for key, run in alone.items()}
        for done in track(as_completed(running), "losses", total=len(running)):
            keep(results, options.results, running[done], done.result())
    for key, (recipe, _, hosts, seed) in track([*todo.items()], "losses on processes"):
        if key not in alone and not options.rehearsals:
            keep(results, options.results, key, real_curve(hosts, recipe, key[2], seed, options.longest))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rates", nargs="*", default=["10mbit", "50mbit", "200mbit", "1gbit"])
    parser.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=["gpt"])
    parser.add_argument("--schedules", type=int, nargs="+", default=[], metavar="STEPS", help="losses with these only")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), help="default: all of the recipe")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--jobs", type=int, default=1, help="rehearsals at once, of one thread each")
    parser.add_argument("--rehearsals", action="store_true", help="no losses that need real processes")
    parser.add_argument("--longest", type=float, default=3000.0, help="seconds after which a launch has failed")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--tables", action="store_true", help="measure nothing, print the page")
    asleep = parser.add_argument_group("steps of accelerators that sleep: loss/asleep.py")
    asleep.add_argument("--asleep", action="store_true", help="time these; losses are those that there are")
    asleep.add_argument("--step-seconds", type=float, default=0.1, help="forward and backward of the small batch")
    asleep.add_argument("--share", type=float, default=0.5, help="of a core, for each host: time is stretched so")
    asleep.add_argument("--quiet", type=float, default=0.1, help="of a core: what other work may take")
    asleep.add_argument("--turns", type=int, default=3, help="at most, of a row during which it took more")
    options = parser.parse_args()
    if options.asleep:
        from loss import asleep_tables
        from loss.asleep import time_asleep

        path = options.results or RESULTS / f"loss-per-second-asleep-{slug()}.json"
        Console().print(Markdown(asleep_tables.page(time_asleep(options, path))))
        return
    options.results = options.results or RESULTS / f"loss-per-second-{slug()}.json"
    results: dict[str, Any] = {"curves": {}, "seconds": {}}
    if options.results.exists():
        results = json.loads(options.results.read_text())
    if not options.tables:
        about(results, timed=bool(options.rates))
        time_steps(options, results)
        train(options, results)
    Console().print(Markdown(page(results)))
