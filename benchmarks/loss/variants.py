"""Losses behind single sentences and small tables of the guides, by rehearsals: no network, no clock.

    nice python benchmarks/loss.py variants --jobs 2          # about half an hour on two cores; a busy machine will do

States: Muon's momentum travels or stays, eight and four workers of `gpt`. Rounds: outer rounds of four bits, by
topology, outer rate and exact steps. Digits: Muon's rate on `vit` and `resnet`, with AdamW. Batches: rates and momenta
of `gpt` in batches of 1,024 tokens. Accumulating: those of `ddp` with Muon in four batches an update. Blocking: whole
runs of `gpt` with rounds that are waited for; three seeds on eight workers, of `ddp`, too. Graphs: whole runs on four
workers by graph, overlapped and not, down to the mean of all after each step, of which there are three seeds. Warm-ups:
whole runs with momentum that rises. One seed each by default, with results equal bit for bit to those of as many
processes. Losses are those of the mean of the workers' models on the test examples.

Writes `results/variants-<hardware>.json`; finished runs are kept in it, and `hardware` is that of the first ones.
"""

import argparse
import json
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from multiprocessing import get_context
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import track

from common.hardware import description, slug
from common.paths import RESULTS
from loss.methods import METHODS
from loss.tuning import last_loss

KEPT = RESULTS / f"variants-{slug()}.json"
MUON, TRAVELS = ["experiment=gossip_muon"], ["experiment=gossip_muon_momentum"]
EVERY_FOURTH = [*TRAVELS, "strategy.states.momentum_buffer.every=4"]
OUTER = ["strategy=gossip", "strategy/combine=pseudo_gradient", "strategy/codec=int4", "optimizer=muon"]
ALL = "strategy.topology.inner._target_=lightning_decentral.gossip.Complete"
WHOLE = ["strategy/topology=every", "strategy.topology.steps=8", ALL]
STREAM = ["strategy/topology=stream", "strategy.topology.steps=8", "strategy.topology.parts=4"]
AFTER = {"": [], ", after 40 exact steps": ["strategy.exact_steps=40"]}


IN_LARGER = {
    "ddp, Muon": [("2e-2", "0.8"), ("4e-2", "0.8")],
    "gossip, int8, Muon": [("3e-2", "0.9"), ("4e-2", "0.8")],
    "streamed outer rounds of 8, int4, Muon": [("2e-2", "0.9"), ("4e-2", "0.8")],
}


class Variant(NamedTuple):
    words: list[str]
    workers: int = 4
    steps: int = 364
    recipe: str = "gpt"
    seed: int = 0


def states() -> dict[str, Variant]:
    found = {}
    for rate in ("2e-2", "3e-2"):
        muon = [f"optimizer.lr={rate}", "optimizer.momentum=0.9"]
        ways = {
            "ddp": ["strategy=ddp", "optimizer=muon"],
            "own": MUON,
            "travels": TRAVELS,
            "every fourth": EVERY_FOURTH,
        }
        found |= {f"states, 8 workers, {rate}, {way}": Variant([*words, *muon], 8) for way, words in ways.items()}
    muon = ["optimizer.lr=2e-2", "optimizer.momentum=0.9"]
    return found | {
        f"states, 4 workers, 2e-2, {w}": Variant([*x, *muon]) for w, x in (("own", MUON), ("travels", TRAVELS))
    }


def rounds() -> dict[str, Variant]:
    found = {}
    for exact, more in AFTER.items():
        for lr, momentum in (("null", "null"), ("0.7", "0.9"), ("0.7", "0.5")):
            rule = [f"strategy.combine.lr={lr}", f"strategy.combine.momentum={momentum}", *more]
            name = f"{lr}, {momentum}{exact}"
            found[f"rounds, Every, {name}"] = Variant([*OUTER, *WHOLE, "strategy.delay=0", *rule], steps=368)
            found[f"rounds, Stream, {name}"] = Variant([*OUTER, *STREAM, "strategy.delay=1", *rule], steps=369)
    return found


def digits() -> dict[str, Variant]:
    found = {}
    for recipe in ("vit", "resnet"):
        for strategy in ("ddp", "gossip"):
            optimizers = {"adamw": ["optimizer=adamw"]}
            for rate in ("3e-3", "6e-3", "1.2e-2", "2e-2"):
                optimizers[f"muon, {rate}"] = ["optimizer=muon", f"optimizer.lr={rate}"]
            for name, words in optimizers.items():
                key = f"digits, {recipe}, {strategy}, {name}"
                found[key] = Variant([f"strategy={strategy}", *words], steps=300, recipe=recipe)
    return found


def batches() -> dict[str, Variant]:
    """Rate and momentum in batches four times as large."""
    found = {}
    for method, grid in IN_LARGER.items():
        for rate, momentum in grid:
            own = [f"optimizer.lr={rate}", f"optimizer.momentum={momentum}", "data.batch_size=16"]
            found[f"batches, {method}, {rate}, {momentum}"] = Variant([*METHODS[method], *own], steps=136)
    return found


def accumulating() -> dict[str, Variant]:
    """Rate and momentum of the strongest peer where an update takes four batches; its own are those of one."""
    grid = (("2e-2", "0.8"), ("3e-2", "0.8"), ("4e-2", "0.8"), ("2e-2", "0.9"))
    words = METHODS["ddp, Muon, fp16 hook, accumulating 4"]
    return {
        f"accumulating, {rate}, {momentum}": Variant(
            [*words, f"optimizer.lr={rate}", f"optimizer.momentum={momentum}"], steps=1080
        )
        for rate, momentum in grid
    }


def blocking() -> dict[str, Variant]:
    """Rounds that are waited for, in whole runs."""
    now = ["strategy.delay=0"]
    eight = {"travels": [*TRAVELS, *now], "ddp": METHODS["ddp, Muon"]}
    return {
        **{
            f"blocking, 8 workers, {way}, seed {s}": Variant(eight[way], 8, 540, seed=s)
            for way in eight
            for s in range(3)
        },
        "blocking, 4 workers, travels": Variant([*TRAVELS, *now], 4, 1080),
        "blocking, 4 workers, own": Variant([*MUON, *now], 4, 1080),
    }


def graphs() -> dict[str, Variant]:
    """Return variants that measure what is left of the gap to `ddp` at smaller consensus errors, down to none."""
    own = {"own": [*MUON, "optimizer.lr=2e-2"], "travels": [*TRAVELS, "optimizer.lr=2e-2"]}
    found = {"graphs, ddp": Variant(METHODS["ddp, Muon"], steps=1080)}
    for way, (graph, delay) in product(own, (("hypercube", 1), ("hypercube", 0), ("complete", 1), ("complete", 0))):
        words = [*own[way], f"strategy/topology={graph}", f"strategy.delay={delay}"]
        found[f"graphs, {graph}, delay {delay}, {way}"] = Variant(words, steps=1080)
    found["graphs, ring, delay 1, own"] = Variant([*own["own"], "strategy/topology=ring"], steps=1080)
    for seed in (1, 2):  # of the nearest variants, next to `ddp`
        for name in ("graphs, ddp", "graphs, complete, delay 0, own"):
            found[f"{name}, seed {seed}"] = found[name]._replace(seed=seed)
    return found


def warm_ups() -> dict[str, Variant]:
    """Momentum that rises from 0.8 to 0.95 over whole runs: by rate, three seeds at one of them, and eight workers."""
    rising = ["scheduler.momentum_start=0.8", "optimizer.momentum=0.95"]
    ways = {"ddp": METHODS["ddp, Muon"], "own": MUON, "travels": TRAVELS}
    rates = {"ddp": ("1e-2", "2e-2", "3e-2"), "own": ("2e-2", "3e-2"), "travels": ("2e-2", "3e-2")}
    found = {
        f"warm-up, {way}, {rate}": Variant([*ways[way], f"optimizer.lr={rate}", *rising], steps=1080)
        for way in ways
        for rate in rates[way]
    }
    for seed in (1, 2):
        for name in ("warm-up, ddp, 2e-2", "warm-up, own, 2e-2", "warm-up, travels, 3e-2"):
            found[f"{name}, seed {seed}"] = found[name]._replace(seed=seed)
    eight = Variant([*TRAVELS, *rising], 8, 540)
    return found | {f"warm-up, 8 workers, travels, seed {seed}": eight._replace(seed=seed) for seed in range(3)}


def keep(kept: dict[str, Any], name: str, found: float) -> None:
    """Write the found loss to the disk."""
    kept["losses"][name], here = found, description()
    if kept.setdefault("hardware", here)["processor"] != here["processor"]:
        kept["also on"] = sorted({*kept.get("also on", []), here["processor"]})
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, of one thread each")
    options = parser.parse_args()
    kept: dict[str, Any] = json.loads(KEPT.read_text()) if KEPT.exists() else {"losses": {}}
    every = {**states(), **rounds(), **digits(), **batches(), **accumulating(), **blocking(), **graphs(), **warm_ups()}
    todo = {name: one for name, one in every.items() if name not in kept["losses"]}
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        running = {
            pool.submit(last_loss, one.recipe, one.words, one.workers, one.steps, one.seed): name
            for name, one in todo.items()
        }
        for done in track(as_completed(running), "runs", total=len(running)):
            keep(kept, running[done], done.result())
    Console().print({name: round(kept["losses"][name], 4) for name in every})
