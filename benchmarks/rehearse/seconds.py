"""Seconds of a step in `rehearse/compared.py`: forecast as `plan` does it, and timed, on the same machine.

A profile is made of each recipe with each optimizer, and of the network at each rate. As many hosts profile at once as
there are processors: where more take turns, their clocks would count the others' turns. Where more share them in the
run, everything takes as many times longer as a step of hosts that exchange nothing does. Right after the profiles the
real steps are timed. A profile is made three times, and the median one taken: the machine isn't equally fast.
"""

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from hydra.utils import instantiate

from common.paths import RESULTS
from common.quiet_recipe import composed
from lightning_decentral.planner.forecasts import method_of
from lightning_decentral.planner.rehearsal.search import MARKS
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
from loss.methods import METHODS
from loss.per_second import FREE, RECIPES, options_of, seconds
from network.accuracy import WARM_UP, Recipe
from network.accuracy import measure as measured
from network.cluster import Cluster, cluster
from network.predicted import profiled as with_network

REAL = RESULTS / "loss-per-second-2-cores.json"
SEED, HOSTS = 0, 4


class Place(NamedTuple):
    """Comparison of a rehearsal with real runs: a recipe, its hosts, the rehearsed steps and the losses to reach.

    Args:
        asleep: seconds that a simulated accelerator takes a step; None: the processor computes it.
    """

    recipe: str
    hosts: int
    steps: int
    targets: tuple[float, ...] = (2.3, 2.1, 1.95)
    asleep: float | None = None

    @property
    def key(self) -> str:
        return f"{self.recipe} {self.hosts}"


PLACES = (
    Place("gpt", HOSTS, 320),
    Place("gpt", 2, 480),
    Place("vit", 2, 120, (1.2, 0.9, 0.7)),
    Place("resnet", 2, 120, (0.7, 0.5, 0.3)),
)
RATES = ("10mbit", "50mbit", "200mbit", "1gbit")
METHODS_HERE = {
    name: words for name, words in METHODS.items() if not any(w.startswith(("hook=", "peer=")) for w in words)
}
PROCESSORS = os.cpu_count() or 1
AT_ONCE, LONGEST = 5, 900.0
"""Methods, and seconds, of a launch of real steps."""
ALONE, PROFILES = WARM_UP + 150, 3
"""Steps of hosts that exchange nothing; profiles of a recipe and optimizer, of which the median one is taken."""
PASSES = ("forward_seconds", "backward_seconds", "update_seconds")
SIDES = ("own_seconds_per_byte", "heard_seconds_per_byte", "round_seconds", "message_seconds")
SIZES = "16384 65536 262144 1048576"
ANY_MODEL = Model("any", "cpu", (BlockCost("all", 1e-3, 1e-3, 1e-3, 2**20),))


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
    """Measure what isn't kept yet: networks, profiles, turns, real steps, real losses; yield its name."""
    yield from networks(kept.setdefault("networks", {}))
    yield from profiles(kept.setdefault("profiles", {}))
    yield from turns(kept.setdefault("turns", {}))
    for place in PLACES:
        yield from real_seconds(place, kept.setdefault("real_seconds", {}))
        if f"{place.key} {SEED}" not in json.loads(REAL.read_text())["curves"]:
            yield from real_curves(place, kept.setdefault("real_curves", {}).setdefault(place.key, {}))


def networks(kept: dict[str, Any]) -> Iterator[str]:
    """Measure the network at each rate, as the hosts do, on messages up to the model's size."""
    for rate in RATES:
        if rate not in kept:
            with cluster(HOSTS, rate, name="profiles") as place:
                kept[rate] = [asdict(cost) for cost in with_network(place, ANY_MODEL, SIZES).network]
            yield rate


def profiles(kept: dict[str, Any]) -> Iterator[str]:
    """Profile each recipe with each optimizer, `PROFILES` times."""
    for turn, (key, words) in product(range(PROFILES), profiled_with().items()):
        if len(kept.setdefault(key, [])) <= turn:
            with cluster(PROCESSORS, FREE, name="profiles") as hosts:
                kept[key].append(asdict(profiled(hosts, words)))
            yield f"{key}, {turn + 1}"


def turns(kept: dict[str, float]) -> Iterator[str]:
    """Measure how many times as long a step takes where hosts share the processors."""
    for place in PLACES:
        if place.hosts > PROCESSORS and place.key not in kept:
            kept[place.key] = alone(place, place.hosts) / alone(place, PROCESSORS)
            yield f"turns {place.key}"


def alone(place: Place, hosts: int) -> float:
    """Seconds of a step where so many compute at once and exchange nothing."""
    recipe = RECIPES[place.recipe]._replace(methods={}, steps=1, asleep=place.asleep)
    with cluster(hosts, FREE, name="alone") as where:
        return float(measured(where, recipe, options_of(None, LONGEST), SEED, ALONE)["alone"])


def real_seconds(place: Place, kept: dict[str, Any], methods: Mapping[str, list[str]] = METHODS_HERE) -> Iterator[str]:
    """Measure the seconds of a step of each method at each rate."""
    for rate in RATES:
        here = kept.setdefault(f"{place.key} {rate}", {})
        for some in in_launches(place, here, methods):
            here |= seconds(place.hosts, some, rate, LONGEST)
            yield f"{place.key} {rate} {', '.join(some.methods)}"


def real_curves(place: Place, kept: dict[str, Any]) -> Iterator[str]:
    """Losses of whole runs of each method on processes, at marks as a rehearsal has them."""
    for some in in_launches(place, kept, METHODS_HERE):
        every = place.steps // MARKS
        with cluster(place.hosts, FREE, name="losses") as hosts:
            runs = measured(hosts, some._replace(every=every), options_of(None, LONGEST), SEED)["methods"]
        kept |= {method: {what: run[what] for what in ("steps", "scores")} for method, run in runs.items()}
        yield f"{place.key} losses {', '.join(some.methods)}"


def in_launches(place: Place, done: dict[str, Any], methods: Mapping[str, list[str]]) -> Iterator[Recipe]:
    """The recipe, each time with some of the methods that aren't done."""
    left = [method for method in methods if method not in done]
    for at in range(0, len(left), AT_ONCE):
        some = {method: methods[method] for method in left[at : at + AT_ONCE]}
        yield RECIPES[place.recipe]._replace(methods=some, asleep=place.asleep)


def profiled_with() -> dict[str, list[str]]:
    """{recipe and optimizer: overrides}, each once."""
    found: dict[str, list[str]] = {}
    for name in dict.fromkeys(place.recipe for place in PLACES):
        for words in METHODS_HERE.values():
            own = [word for word in words if word.startswith(("experiment=", "optimizer="))]
            found.setdefault(profile_of(name, words), [*RECIPES[name].words, *own, "trainer=cpu"])
    return found


def profile_of(name: str, words: list[str]) -> str:
    """Return the name of the profile, by its optimizer."""
    return f"{name} {composed([*RECIPES[name].words, *words], SEED).optimizer._target_.rpartition('.')[2]}"


def forecasts(kept: dict[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """{place: {rate: {method: seconds per step}}}, by what was measured."""
    links = {rate: Network(tuple(LinkCost(**one) for one in costs)) for rate, costs in kept["networks"].items()}
    known = {key: median_of([read_from(one) for one in found]) for key, found in kept["profiles"].items()}
    found: dict[str, dict[str, dict[str, float]]] = {}
    for place, rate in product(PLACES, RATES):
        here = found.setdefault(place.key, {}).setdefault(rate, {})
        for method, words in METHODS_HERE.items():
            strategy = instantiate(composed([*RECIPES[place.recipe].words, *words], SEED).strategy, _convert_="all")
            profile = known[profile_of(place.recipe, words)]
            here[method] = seconds_of(profile, strategy, links[rate], place.hosts, kept["turns"].get(place.key, 1.0))
    return found


def median_of(turns: list[Profile]) -> Profile:
    """The one whose step takes neither the least nor the most."""
    return sorted(turns, key=lambda one: one.model.seconds)[len(turns) // 2]


def read_from(found: dict[str, Any]) -> Profile:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        path.write_text(json.dumps({"format": FORMAT, "version": VERSION, **found}))
        return read(path)


def shared(model: Model, turns: float) -> Model:
    """Return the model with all its times multiplied, as where hosts share the processors."""
    blocks = tuple(replace(one, **{k: turns * getattr(one, k) for k in PASSES}) for one in model.blocks)
    rounds = tuple(replace(one, **{k: turns * getattr(one, k) for k in SIDES}) for one in model.rounds)
    return replace(
        model,
        blocks=blocks,
        rounds=rounds,
        loop_seconds=turns * model.loop_seconds,
        products_per_second=model.products_per_second / turns,
    )


def seconds_of(profile: Profile, strategy: Any, network: Network, hosts: int, turns: float) -> float:
    where = Setting(shared(profile.model, turns), network, Devices(hosts))
    factors = drawn(profile.variation, hosts)
    return float(method_of(strategy, where.cluster, 1).seconds(where, factors).mean())
