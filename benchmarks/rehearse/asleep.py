"""Seconds of a step in `rehearse/compared.py --asleep`: forecast and timed on hosts whose accelerators are simulated.

A step's passes are a sleep (`network/asleep.py`), so that hosts don't take turns on the processors that they share, as
they do where they compute; parameters, messages, codecs, Lightning's loop and the network are as in a run. The profile
of a recipe holds the sleep, the loop's processor time without it, and rounds of gossip as a host measures them
while all others train. It is made on as many hosts as the run has, with the network at each rate.
"""

from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from typing import Any

from hydra.utils import instantiate

from common.quiet_recipe import built, composed
from lightning_decentral.planner.forecasts import method_of
from lightning_decentral.shared.plan.forecast import Cluster as Devices
from lightning_decentral.shared.plan.forecast import Setting, even
from lightning_decentral.shared.plan.network import Network
from lightning_decentral.shared.plan.profile import LinkCost, Model, Profile
from loss.per_second import FREE, RECIPES
from network.asleep import blocks_of, costs
from network.cluster import cluster
from network.predicted import rounds
from rehearse.seconds import METHODS_HERE, PLACES, RATES, SEED, Place, alone, networks, read_from, real_seconds

STEP = 0.1
"""Seconds that the accelerator takes: of a larger batch than the processor has, or of a larger model."""
ASLEEP = tuple(place._replace(asleep=STEP) for place in PLACES)


def measure(kept: dict[str, Any]) -> Iterator[str]:
    """Measure what isn't kept yet: networks, profiles, real steps; yield its name."""
    yield from networks(kept.setdefault("networks", {}))
    for place in ASLEEP:
        if place.key not in kept.setdefault("profiles", {}):
            kept["profiles"][place.key] = asdict(Profile(profiled(place)))
            yield f"profile {place.key}"
        methods = {method: METHODS_HERE[method] for method in kept["curves"][place.key]}
        yield from real_seconds(place, kept.setdefault("real_seconds", {}), methods)


def profiled(place: Place) -> Model:
    """Return the profile of hosts that all train at once."""
    _, model, _ = built(composed(RECIPES[place.recipe].words, SEED))
    blocks = blocks_of(model)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    with cluster(place.hosts, FREE, name="profiles") as hosts:
        works = rounds(hosts, size, STEP)
    beside = alone(place, place.hosts) - STEP
    made = costs(blocks, STEP, beside)
    return Model(place.recipe, "simulated accelerator", made, rounds=works, states=(("momentum_buffer", size),))


def forecasts(kept: dict[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """{place: {rate: {method: seconds per step}}}, by what was measured."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for place, rate in product(ASLEEP, RATES):
        network = Network(tuple(LinkCost(**one) for one in kept["networks"][rate]))
        where = Setting(read_from(kept["profiles"][place.key]).model, network, Devices(place.hosts))
        here = found.setdefault(place.key, {}).setdefault(rate, {})
        for method in kept["curves"][place.key]:
            words = [*RECIPES[place.recipe].words, *METHODS_HERE[method]]
            strategy = instantiate(composed(words, SEED).strategy, _convert_="all")
            here[method] = float(method_of(strategy, where.cluster, 1).seconds(where, even(place.hosts))[0])
    return found
