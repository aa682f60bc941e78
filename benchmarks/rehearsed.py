"""Rehearsed steps times forecast seconds against real seconds to a loss, and what a rehearsal computes.

    python benchmarks/rehearsed.py                  # rehearses; some thirty minutes, a busy machine will do
    sudo python benchmarks/rehearsed.py --forecast  # profiles, forecasts and real steps; a quiet half hour
    python benchmarks/rehearsed.py --cost           # two minutes

Real losses are those of `loss_per_second.py` (committed): `gpt` on four hosts, with 256 and 1,024 tokens a worker.
Those of two hosts, which have a processor each, are measured here, by the same whole runs. The same settings are
rehearsed for the first steps of the same schedule and the same seed, on the same test examples. Methods with a hook of
torch's or of another package can't be forecast and are left out.

Seconds of a step are forecast as `plan` does it: from a profile of the model with each optimizer, and of the network at
each rate. As many hosts profile at once as there are processors, and a step's work takes as many times as long as hosts
share one: where more take turns, their clocks would count the others' turns. Right after the profiles the real steps
are timed on the same machine. What was measured is kept and not measured again; take it out of the results for that.

The cost is processor time: of all threads over whole steps, against forward and backward alone, one torch thread. The
same is counted of `plain` training: one worker's forward, backward, clipping and update, by loops of torch's own.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cluster import Cluster, ClusterError, cluster
from cluster_accuracy import EXAMPLES, Recipe
from cluster_accuracy import measure as measured
from hardware import description, slug
from hydra.utils import instantiate
from loss_per_second import FREE, METHODS, RECIPES, options_of, seconds
from predicted import profiled as with_network
from quiet_recipe import built, composed
from rich.console import Console
from rich.progress import track
from torch.utils.data import DataLoader, Subset

from lightning_decentral.planner.forecasts import method_of, strategy_of
from lightning_decentral.planner.rehearsal.batches import loader_of, shared_out
from lightning_decentral.planner.rehearsal.crew import Crew
from lightning_decentral.planner.rehearsal.evaluation import Evaluation
from lightning_decentral.planner.rehearsal.rehearse import METHODS as REHEARSED
from lightning_decentral.planner.rehearsal.search import Course, Point, reached, search
from lightning_decentral.planner.rehearsal.worker import Loop, configured, quiet
from lightning_decentral.shared.plan.forecast import Cluster as Devices
from lightning_decentral.shared.plan.forecast import Setting, drawn
from lightning_decentral.shared.plan.network import Network
from lightning_decentral.shared.plan.profile import (
    FORMAT,
    VERSION,
    BlockCost,
    LinkCost,
    Model,
    Profile,
    RoundWork,
    read,
)

RESULTS = Path(__file__).parent / "results"
REAL = RESULTS / "loss-per-second-2-cores.json"
SEED, HOSTS = 0, 4


class Place(NamedTuple):
    """What is compared: a recipe on so many hosts, rehearsed for so many steps, to these losses."""

    recipe: str
    hosts: int
    steps: int
    targets: tuple[float, ...] = (2.3, 2.1, 1.95)

    @property
    def key(self) -> str:
        return f"{self.recipe} {self.hosts}"


PLACES = (Place("gpt", HOSTS, 320), Place("gpt-1024-tokens", HOSTS, 120), Place("gpt", 2, 480))
RATES = ("10mbit", "50mbit", "200mbit", "1gbit")
WITHIN, ALIKE = 0.15, 0.1
"""Forecast seconds are right if not farther off; of methods nearer to each other none is the best."""
COST_STEPS, TURNS, PLAIN = 30, 3, "plain"
PASSES = ("forward_seconds", "backward_seconds", "update_seconds")
SIDES = ("own_seconds_per_byte", "heard_seconds_per_byte", "round_seconds", "message_seconds")
SIZES = "16384 65536 262144 1048576"
ANY_MODEL = Model("any", "cpu", (BlockCost("all", 1e-3, 1e-3, 1e-3, 2**20),))
METHODS_HERE = {
    name: words for name, words in METHODS.items() if not any(w.startswith(("hook=", "peer=")) for w in words)
}
PROCESSORS = os.cpu_count() or 1
AT_ONCE, LONGEST = 3, 900.0
"""Methods, and seconds, of a launch of real steps."""


def crew_of(
    recipe: Recipe, words: list[str], strategy: Any = None, hosts: int = HOSTS
) -> tuple[Any, Any, Callable[[float], Crew]]:
    """(module, data, what makes the crew at a learning rate)."""
    cfg = composed([*recipe.words, *words], SEED)
    data, module, _ = built(cfg)
    batches, epoch = shared_out(loader_of(module, data), hosts)
    used = strategy or instantiate(cfg.strategy, _convert_="all")

    def make(rate: float) -> Crew:
        loop = Loop(cfg.trainer.gradient_clip_val, rate, epoch, recipe.steps)
        return Crew(module, batches, used, hosts, recipe.steps, loop=loop)

    return module, data, make


def curve(place: Place, words: list[str]) -> list[Point]:
    """(step, test loss) of a method, rehearsed."""
    module, data, make = crew_of(RECIPES[place.recipe], words, hosts=place.hosts)
    data.setup("test")
    tests = DataLoader(Subset(data.splits["test"], range(EXAMPLES)), batch_size=EXAMPLES // 4)
    course = Course(place.steps, 0.0, Evaluation(module, list(tests)), lambda: None)
    return list(search(make, [1.0], course).points)


def shares() -> dict[str, float]:
    """{method, or plain: processor time of steps over that of forward and backward}, median of turns."""
    torch.set_num_threads(1)
    kinds: dict[str, Callable[[], float]] = {PLAIN: _plain_share}
    kinds |= {one.title: partial(_share, one.words) for one in REHEARSED}
    turns = [{title: share() for title, share in kinds.items()} for _ in track(range(TURNS), "cost")]
    return {title: statistics.median(turn[title] for turn in turns) for title in kinds}


def _plain_share() -> float:
    cfg = composed([*RECIPES["gpt"].words], SEED)
    data, module, _ = built(cfg)
    optimizer, _ = configured(quiet(module).train(), RECIPES["gpt"].steps)
    batches = shared_out(loader_of(module, data), HOSTS)[0](0)
    rows = [next(batches) for _ in range(3 + COST_STEPS)]

    def train(some: list[Any]) -> None:
        for index, batch in enumerate(some):
            loss = module.training_step(batch, index)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), cfg.trainer.gradient_clip_val)
            optimizer.step()

    train(rows[:3])
    needed, begun = _counted(module), time.process_time()
    train(rows[3:])
    return (time.process_time() - begun) / sum(needed)


def _share(words: str) -> float:
    _, _, make = crew_of(RECIPES["gpt"], [], strategy_of(words))
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


# ---- forecast seconds ------------------------------------------------------------------------------------------------


def profiled(hosts: Cluster, words: list[str]) -> Profile:
    """Mean of what these hosts measure at once, as `lightning-decentral profile` does it."""
    with tempfile.TemporaryDirectory() as folder:
        command = f"exec {Path(sys.executable).parent}/lightning-decentral profile {' '.join(words)}"
        codes = hosts.run(["bash", "-c", f"{command} --out {folder}/$NODE_RANK.json"], seconds=300)
        if any(codes):
            raise SystemExit(f"hosts ended with {codes}")
        found = [read(Path(folder) / f"{rank}.json") for rank in range(hosts.hosts)]
    models = [one.model for one in found]
    blocks = tuple(_mean_block(same) for same in zip(*(model.blocks for model in models), strict=True))
    works = tuple(_mean_work(same) for same in zip(*(model.rounds for model in models), strict=True))
    loop, rate = (statistics.mean(getattr(m, k) for m in models) for k in ("loop_seconds", "products_per_second"))
    model = replace(models[0], blocks=blocks, rounds=works, loop_seconds=loop, products_per_second=rate)
    return Profile(model, (), tuple(one for each in found for one in each.variation))


def _mean_block(same: tuple[BlockCost, ...]) -> BlockCost:
    return replace(same[0], **_means(same, PASSES))


def _mean_work(same: tuple[RoundWork, ...]) -> RoundWork:
    return replace(same[0], **_means(same, SIDES))


def _means(same: tuple[Any, ...], names: tuple[str, ...]) -> dict[str, float]:
    return {name: statistics.mean(getattr(one, name) for one in same) for name in names}


def measure(kept: dict[str, Any]) -> Iterator[str]:
    """Each that isn't kept yet, as `asdict` has them: networks, profiles, real steps, real losses; says which."""
    networks, profiles = kept.setdefault("networks", {}), kept.setdefault("profiles", {})
    for rate in RATES:
        if rate not in networks:
            networks[rate] = [asdict(cost) for cost in network_at(rate)]
            yield rate
    for key, words in profiled_with().items():
        if key not in profiles:
            with cluster(PROCESSORS, FREE, name="profiles") as hosts:
                profiles[key] = asdict(profiled(hosts, words))
            yield key
    for place in PLACES:
        yield from real_seconds(place, kept.setdefault("real_seconds", {}))
        if f"{place.key} {SEED}" not in json.loads(REAL.read_text())["curves"]:
            yield from real_curves(place, kept.setdefault("real_curves", {}).setdefault(place.key, {}))


def real_seconds(place: Place, kept: dict[str, Any]) -> Iterator[str]:
    """Of a step of each method at each rate."""
    for rate in RATES:
        here = kept.setdefault(f"{place.key} {rate}", {})
        for some in in_launches(place, here):
            here |= seconds(place.hosts, some, rate, LONGEST)
            yield f"{place.key} {rate} {', '.join(some.methods)}"


def real_curves(place: Place, kept: dict[str, Any]) -> Iterator[str]:
    """Losses of whole runs of each method on processes."""
    for some in in_launches(place, kept):
        with cluster(place.hosts, FREE, name="losses") as hosts:
            runs = measured(hosts, some, options_of(None, LONGEST), SEED)["methods"]
        kept |= {method: {what: run[what] for what in ("steps", "scores")} for method, run in runs.items()}
        yield f"{place.key} losses {', '.join(some.methods)}"


def in_launches(place: Place, done: dict[str, Any]) -> Iterator[Recipe]:
    """The recipe, each time with some of the methods that aren't done."""
    left = [method for method in METHODS_HERE if method not in done]
    for at in range(0, len(left), AT_ONCE):
        some = {method: METHODS_HERE[method] for method in left[at : at + AT_ONCE]}
        yield RECIPES[place.recipe]._replace(methods=some)


def network_at(rate: str) -> tuple[LinkCost, ...]:
    """As the hosts measure it, on messages up to the model's size."""
    with cluster(HOSTS, rate, name="profiles") as place:
        return with_network(place, ANY_MODEL, SIZES).network


def profiled_with() -> dict[str, list[str]]:
    """{recipe and optimizer: words}, each once."""
    found: dict[str, list[str]] = {}
    for name in dict.fromkeys(place.recipe for place in PLACES):
        for words in METHODS_HERE.values():
            own = [word for word in words if word.startswith(("experiment=", "optimizer="))]
            found.setdefault(profile_of(name, words), [*RECIPES[name].words, *own, "trainer=cpu"])
    return found


def profile_of(name: str, words: list[str]) -> str:
    """By its optimizer."""
    return f"{name} {composed([*RECIPES[name].words, *words], SEED).optimizer._target_.rpartition('.')[2]}"


def forecasts(kept: dict[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """{place: {rate: {method: seconds per step}}}, by what was measured."""
    networks = {rate: Network(tuple(LinkCost(**one) for one in costs)) for rate, costs in kept["networks"].items()}
    profiles = {key: read_from(found) for key, found in kept["profiles"].items()}
    found: dict[str, dict[str, dict[str, float]]] = {}
    for place, rate in product(PLACES, RATES):
        here = found.setdefault(place.key, {}).setdefault(rate, {})
        for method, words in METHODS_HERE.items():
            strategy = instantiate(composed([*RECIPES[place.recipe].words, *words], SEED).strategy, _convert_="all")
            profile = profiles[profile_of(place.recipe, words)]
            here[method] = seconds_of(profile, strategy, networks[rate], place.hosts)
    return found


def read_from(found: dict[str, Any]) -> Profile:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        path.write_text(json.dumps({"format": FORMAT, "version": VERSION, **found}))
        return read(path)


def shared(model: Model, hosts: int) -> Model:
    """As it takes where so many hosts share the processors."""
    turns = max(1.0, hosts / PROCESSORS)
    blocks = tuple(replace(one, **{k: turns * getattr(one, k) for k in PASSES}) for one in model.blocks)
    rounds = tuple(replace(one, **{k: turns * getattr(one, k) for k in SIDES}) for one in model.rounds)
    return replace(
        model,
        blocks=blocks,
        rounds=rounds,
        loop_seconds=turns * model.loop_seconds,
        products_per_second=model.products_per_second / turns,
    )


def seconds_of(profile: Profile, strategy: Any, network: Network, hosts: int) -> float:
    where = Setting(shared(profile.model, hosts), network, Devices(hosts))
    factors = drawn(profile.variation, hosts)
    return float(method_of(strategy, where.cluster, 1).seconds(where, factors).mean())


# ---- the comparison --------------------------------------------------------------------------------------------------


def compared(kept: dict[str, Any]) -> dict[str, Any]:
    """Rows of each place, rate, target and method, and how many are right."""
    known, rows = json.loads(REAL.read_text())["curves"], []
    for place, rate in product(PLACES, RATES):
        runs = known.get(f"{place.key} {SEED}") or kept["real_curves"][place.key]
        took, told = kept["real_seconds"][f"{place.key} {rate}"], kept["forecasts"][place.key][rate]
        for target, (method, points) in product(place.targets, kept["curves"][place.key].items()):
            run = runs.get(method, {"steps": (), "scores": ()})
            steps = reached(points, target), reached([*zip(run["steps"], run["scores"], strict=True)], target)
            if steps[0] is not None and steps[1] is not None:
                row = {"place": place.key, "rate": rate, "target": target, "method": method, "steps": steps}
                row["step_seconds"] = told[method], took[method]
                row["seconds"] = steps[0] * told[method], steps[1] * took[method]
                rows.append(row)
    return {"rows": rows, **verdict(rows)}


def verdict(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many seconds and steps are right, in how many settings the best is the best, how many pairs have their order.
    Pairs are counted twice: all, and those that are as far apart as a setting's two best have to be."""
    found = {"settings": 0, "clear": 0, "best_right": 0, "pairs": 0, "pairs_right": 0, "apart": 0, "apart_right": 0}
    for setting in dict.fromkeys((row["place"], row["rate"], row["target"]) for row in rows):
        here = [row for row in rows if (row["place"], row["rate"], row["target"]) == setting]
        found["settings"] += 1
        first, second = sorted(here, key=lambda row: row["seconds"][1])[:2]
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
    said = (
        f"Within {WITHIN:.0%}: {found['seconds_within']} of {found['values']} seconds, {found['steps_within']} numbers "
    )
    said += (
        f"of steps, {found['step_seconds_within']} seconds of a step. The best one right in {found['best_right']} of "
    )
    said += (
        f"{found['clear']} settings where the two best differ by more than {ALIKE:.0%}, of {found['settings']} in all; "
    )
    said += f"the order in {found['pairs_right']} of {found['pairs']} pairs."
    return "\n".join([*lines, "", said]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cost", action="store_true", help="what a rehearsal computes, and nothing else")
    parser.add_argument("--forecast", action="store_true", help="profiles and forecasts, and nothing else; needs root")
    options = parser.parse_args()
    path = RESULTS / f"rehearsed-{slug()}.json"
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if options.cost:
        kept["cost"] = shares()
        kept["plain_cost"] = kept["cost"].pop(PLAIN)
    elif options.forecast:
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
    path.write_text(json.dumps({**kept, "hardware": description()}, indent=1) + "\n")
    if "curves" in kept and "forecasts" in kept:
        kept |= compared(kept)
        path.with_suffix(".md").write_text(page(kept))
        Console().print(page(kept))
    path.write_text(json.dumps({**kept, "hardware": description()}, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except ClusterError as error:
        sys.exit(f"error: {error}")
