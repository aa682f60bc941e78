"""What a run may be: axes of named values, events at steps, and which of them go together in advance.

A rule, codec or topology joins by being listed in `tests/gossip/{rules,codecs,topologies}.py`.
"""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from types import SimpleNamespace
from typing import Any, NamedTuple

from lightning_decentral.elastic.checks import elastic_rule
from lightning_decentral.gossip import (
    AllReduce,
    Complete,
    DifferenceCompression,
    Dyadic,
    Elastic,
    Every,
    Float16,
    Float32,
    FullyShard,
    Gossip,
    GossipReplicas,
    Int8,
    MetropolisHastings,
    OutDegree,
    Ring,
    Solo,
    TopK,
    Topology,
    Travel,
    Uniform,
)
from lightning_decentral.gossip.compute.combine.combine import refuse_lossy
from lightning_decentral.gossip.mixer_builder import check
from lightning_decentral.pipeline import AverageGradients
from tests.gossip import codecs, rules, topologies

BATCHES = 6
"""Of an epoch on each worker."""
EPOCHS = 3
STEPS = BATCHES * EPOCHS
NONE = "-"
"""The value of an axis that the method doesn't have."""


def _named(values: Iterable[Any]) -> dict[str, Any]:
    return {repr(value): value for value in values}


def _of_each_class(values: Iterable[Any]) -> list[Any]:
    """The last listed of each class: of small blocks, and other than the default."""
    return list({type(value): value for value in values}.values())


WORKERS = {"2": 2, "3": 3, "4": 4, NONE: 1}
RULES = {"default": None, **_named([*_of_each_class(rules.instances()), Gossip(rate=0.4)])}
SPARSE = DifferenceCompression(TopK(fraction=0.3, block=8))
CODECS = {"default": None, **_named([*_of_each_class(codecs.instances()), SPARSE])}
# Those that serve one of 2, 3 and 4 workers.
_SERVING = [t for t in topologies.instances() if any(topologies.serves(t, size) for size in (2, 3, 4))]
_LOCAL = [Every(2, Complete()), Every(3, Complete()), Every(2, Ring())]
TOPOLOGIES: dict[str, Topology | None] = {"default": None, **_named([*_of_each_class(_SERVING), *_LOCAL])}
WEIGHTS = {"default": None, **_named([MetropolisHastings(), Uniform(), OutDegree(), Dyadic()])}
STATES: dict[str, dict[str, Travel]] = {
    "none": {},
    "momentum": {"momentum_buffer": Travel()},
    "momentum, coded": {"momentum_buffer": Travel(codec=Int8(), every=2)},
}
ISLANDS = {"Solo": Solo(), "AllReduce": AllReduce(2), "FullyShard": FullyShard(2), NONE: Solo()}
STAGES = 2
"""Of one token pipeline."""

# The first value of an axis is what the smallest run has.
AXES: dict[str, tuple[str, ...]] = {
    "method": ("gossip", "elastic", "compressed", "partial", "spilled", "pipeline", "pipelines"),
    "loop": ("Trainer", "Fabric"),
    "workers": ("2", "3", "4"),
    "rule": tuple(RULES),
    "codec": tuple(CODECS),
    "topology": tuple(TOPOLOGIES),
    "weights": tuple(WEIGHTS),
    "delay": ("1", "0", "2", "3"),
    "island": ("Solo", "AllReduce", "FullyShard"),
    "states": tuple(STATES),
    "exact": ("0", "3"),
    "bucket": ("default", "64"),
    "evaluate": ("mean", "own"),
    "gradient": ("slopes", "still", "bowl"),
    "optimizer": ("sgd", "momentum", "adamw", "two", "turns"),
    "schedule": ("none", "decay", "restarts"),
    "accumulate": ("1", "2"),
    "clip": ("none", "norm", "value"),
    "precision": ("32-true", "bf16-mixed", "bf16-true"),
    "dtype": ("float64", "float32", "several"),
    "layout": ("contiguous", "channels_last", "transposed", "one alone"),
    "shape": ("plain", "tied", "experts", "empty"),
    "given": ("alike", "another bucket", "another delay", "another codec"),
}
_GOSSIP = ("rule", "topology", "weights", "delay", "island", "states", "exact", "evaluate")
FOREIGN: dict[str, tuple[str, ...]] = {
    "gossip": (),
    "elastic": ("loop", "island", "states", "exact"),
    "compressed": _GOSSIP,
    "partial": ("codec", *_GOSSIP),
    "spilled": ("loop", "workers", "codec", "bucket", "given", *_GOSSIP),
    "pipeline": ("loop", "bucket", "given", *_GOSSIP),
    "pipelines": ("loop", "bucket", "given", "codec", "island", "states", "exact", "evaluate"),
    "Fabric": ("island", "states", "exact", "evaluate", "accumulate", "clip"),
}
"""Axes that a method, or a loop, doesn't have. Of pipelines one has replicas that average gradients, one gossips."""


class Event(NamedTuple):
    """What happens once in a run.

    Args:
        at: number of the batch, from 0, over all epochs.
        who: the worker of events that happen to one.
    """

    kind: str
    at: int
    who: int


EVENTS = (
    *("save", "validate", "freeze", "thaw", "thaw inside", "thaw before backward", "replace", "replace one"),
    *("prune", "reparametrize", "layout", "late buffer", "filling buffer", "write", "write at end", "apart"),
    "clamp",
    *("nan", "raise", "kill", "stop", "refit", "resume", "resume elsewhere"),
)
FOLLOWED = ("thaw", "thaw inside", "thaw before backward", "replace", "replace one", "prune", "reparametrize")
"""Changes to which all workers come in the same step."""
COSTLY = ("raise", "kill")
"""Events after which the others wait some seconds: there are fewer of them."""
IN_LOOP = ("freeze", "thaw", "layout", "write", "write at end", "prune", "reparametrize", "kill", "apart")
"""Events of a loop with Fabric, where an exception is the user's."""
BESIDE_RESUME = ("save", "validate", "late buffer", "filling buffer", "write at end", "resume")
"""Events that a run which goes on from a file needs no help to repeat."""


@dataclass(frozen=True)
class Case:
    """One run: a value for each axis, and events."""

    values: Mapping[str, str]
    events: tuple[Event, ...] = ()

    def __getitem__(self, axis: str) -> str:
        return self.values[axis]

    @property
    def workers(self) -> int:
        """Devices."""
        return WORKERS[self["workers"]]

    @property
    def stages(self) -> int:
        """Devices that share one model's blocks."""
        return STAGES if self["method"].startswith("pipeline") else 1

    @property
    def elsewhere(self) -> "Case":
        """The run that goes on from the file by another number of workers."""
        return replace(self.but(workers={"2": "4", "3": "2", "4": "2"}[self["workers"]]), events=())

    def examples(self, rank: int) -> list[int]:
        """The workers whose known gradients a device's batch has: a pipeline's has two rows."""
        pipeline = rank // self.stages
        return [pipeline] if self.stages == 1 else [pipeline, pipeline + 10]

    @property
    def bounds(self) -> tuple[int, int]:
        """Of elastic workers: (least, most). Of two one goes on alone where the least allows it."""
        return 1 if self.workers == 2 and self.has("raise", "kill") else self.workers, self.workers

    @property
    def replicas(self) -> int:
        """Models that may differ."""
        return self.workers // (self.stages * ISLANDS[self["island"]].devices) if self.gossips else 1

    @property
    def gossips(self) -> bool:
        return self["method"] in ("gossip", "elastic", "pipelines")

    @property
    def may_stop_alone(self) -> bool:
        """Whether one worker may stop early: nobody needs its gradients, or waits for it within an epoch."""
        # Nor may others come to a change for which one has stopped too early: that ends all by name.
        return self.replicas == self.workers and not self.has("save", "validate", *FOLLOWED)

    def has(self, *kinds: str) -> bool:
        return any(event.kind in kinds for event in self.events)

    def but(self, **values: str) -> "Case":
        return replace(self, values=fitting({**self.values, **values}))

    def __str__(self) -> str:
        """As JSON, of what isn't the first value."""
        small = {axis: value for axis, value in self.values.items() if value not in (AXES[axis][0], NONE)}
        return json.dumps({**small, "events": [list(event) for event in self.events]})

    @classmethod
    def read(cls, text: str) -> "Case":
        given = json.loads(text)
        events = tuple(Event(*event) for event in given.pop("events", ()))
        return cls(fitting({**smallest(), **given}), events)


def smallest() -> dict[str, str]:
    return {axis: values[0] for axis, values in AXES.items()}


def fitting(values: Mapping[str, str]) -> dict[str, str]:
    """The same values, without those of axes that the method doesn't have, with first ones where it lacks some."""
    foreign = FOREIGN[values["method"]]
    if values["loop"] == "Fabric" and "loop" not in foreign:
        foreign = (*foreign, *FOREIGN["Fabric"])
    filled = {axis: AXES[axis][0] if value == NONE else value for axis, value in values.items()}
    if filled["method"] in ("spilled", "pipeline", "pipelines") and filled["layout"] == "one alone":
        filled["layout"] = "contiguous"  # there is one, or the last worker has another part of the model
    if filled["given"].removeprefix("another ") in foreign:
        filled["given"] = "another bucket"
    if filled["optimizer"] in ("two", "turns"):  # manual optimization, of which Lightning does none of these
        filled |= {"accumulate": "1", "clip": "none", "schedule": "none"}
    return {axis: NONE if axis in foreign else value for axis, value in filled.items()}


def options(case: Case) -> dict[str, Any]:
    """What the strategy's constructor is given, but for those of DDP."""
    given: dict[str, Any] = {} if case["bucket"] in ("default", NONE) else {"bucket_bytes": int(case["bucket"])}
    given |= {} if case["codec"] in ("default", NONE) else {"codec": CODECS[case["codec"]]}
    if case["method"] == "pipeline":
        return {"replicas": AverageGradients(**given)}
    if not case.gossips:
        return given
    for name, axis, table in (("combine", "rule", RULES), ("topology", "topology", TOPOLOGIES)):
        given |= {} if case[axis] == "default" else {name: table[case[axis]]}  # type: ignore[index]
    given |= {} if case["weights"] == "default" else {"weights": WEIGHTS[case["weights"]]}
    given["delay"] = int(case["delay"])
    if case["method"] == "pipelines":
        return {"replicas": GossipReplicas(**given)}
    if case["method"] == "elastic":
        given["evaluate"] = case["evaluate"]
    if case["method"] == "gossip" and case["loop"] == "Trainer":
        given |= {"island": ISLANDS[case["island"]], "exact_steps": int(case["exact"]), "evaluate": case["evaluate"]}
        given |= {"states": STATES[case["states"]]} if case["states"] != "none" else {}
    return given


def given_to(case: Case, rank: int) -> dict[str, Any]:
    """`options` of this worker: the last one has another value where the case says so."""
    given = options(case)
    if rank < case.workers - 1 or case["given"] in ("alike", NONE):
        return given
    if case["given"] == "another delay":
        return {**given, "delay": int(_another_delay(case))}
    other = Float32() if isinstance(given.get("codec"), Float16) else Float16()
    return {**given, **({"codec": other} if case["given"] == "another codec" else {"bucket_bytes": 96})}


def differs(case: Case) -> bool:
    """Whether a worker was given something else than the others, of which all must be told before training."""
    return case["given"] not in ("alike", NONE) or case["layout"] == "one alone"


ARRIVES = 0.45
"""The largest rate with a codec that remembers, of those listed and the probe's small matrices."""


def planned(case: Case) -> str:
    """Why the plan of a gossip can't be, by the package's own checks of plans; empty: it can."""
    if case.workers % (case.stages * ISLANDS[case["island"]].devices):
        return "workers don't fill the islands, or the pipelines"
    try:
        if case.gossips:
            (_check_pipelines if case["method"] == "pipelines" else _check)(case)
    except ValueError as error:
        return str(error)
    # A worker whose own plan can't be ends before it meets the others.
    return planned(case.but(given="alike", delay=_another_delay(case))) if case["given"] == "another delay" else ""


def _check_pipelines(case: Case) -> None:
    options(case)["replicas"].check(case.replicas, case.replicas)


def _check(case: Case) -> None:
    from lightning_decentral.gossip import Auto, Plain  # here: as the strategy's own defaults

    given = options(case)
    rule, codec, topology = given.get("combine") or Gossip(), given.get("codec") or Plain(), given.get("topology")
    refuse_lossy(codec, rule)
    if codec.remembers and rule.largest_rate > ARRIVES:
        raise ValueError("the codec passes on less than the rate")
    if given.get("states") and case["optimizer"] in ("sgd", "adamw"):
        raise ValueError("the optimizer keeps no such state")
    placed = (topology or Auto()).placed(case.replicas)
    rule = rule.placed(placed.fragments[0], case.replicas)
    weights = given.get("weights") or rule.weights
    plan = {"topology": placed, "combine": rule, "weights": weights, "delay": given["delay"], "codec": codec}
    island, states = ISLANDS[case["island"]], given.get("states", {})
    check(SimpleNamespace(**plan, island=island, states=states), case.replicas)  # type: ignore[arg-type]
    if case["method"] == "elastic":
        bounds = Elastic(workers=(case.workers, case.workers))
        elastic_rule(rule, topology or Auto(), weights, codec, given["delay"], bounds)


def _another_delay(case: Case) -> str:
    return str((int(case["delay"]) + 1) % 4)


def draw(
    numbers: random.Random, fixed: Mapping[str, str] | None = None, patience: int = 200, usual: float = 0.5
) -> Case:
    """A case with these values whose plan can be, but for one in sixteen; with up to three events.

    Args:
        usual: how often a value is the first of its axis beyond what chance makes it.
    """
    anything = numbers.random() < 1 / 16
    for _ in range(patience):
        values = {axis: numbers.choice(values) for axis, values in AXES.items()}
        case = Case(fitting({**_mild(values, numbers, usual), **(fixed or {})}))
        if anything or not planned(case):
            break
    return replace(case, events=drawn_events(case, numbers))


def _mild(values: dict[str, str], numbers: random.Random, usual: float) -> dict[str, str]:
    """Many values are the first ones: where everything is unusual, most is refused for one reason."""
    rare = {"given": 0.96, "layout": 0.7, "method": 0.0}
    return {axis: AXES[axis][0] if numbers.random() < rare.get(axis, usual) else v for axis, v in values.items()}


def drawn_events(case: Case, numbers: random.Random) -> tuple[Event, ...]:
    kinds = numbers.sample(EVENTS, numbers.choice((0, 1, 1, 2, 3)))
    kinds = [kind for kind in kinds if kind not in COSTLY or numbers.random() < 0.25]
    return tuple(event_of(kind, case, numbers) for kind in served(case, kinds))


def event_of(kind: str, case: Case, numbers: random.Random) -> Event:
    at = numbers.randrange(2, STEPS - 3)
    if kind.startswith("resume") and case["accumulate"] == "2":  # gradients of a step that is under way are in no file
        at = at // BATCHES * BATCHES + numbers.choice((1, 3))
    elif kind.startswith("resume") and at % BATCHES == BATCHES - 1:  # within an epoch
        at -= 1
    elif kind == "stop" and case["accumulate"] == "2":  # nor does a second fit go on with them, under any strategy
        at |= 1
    return Event(kind, at, numbers.randrange(case.workers))


def served(case: Case, kinds: Sequence[str]) -> list[str]:
    """Those that mean something in this run, and in each other's company."""
    found = [kind for kind in kinds if _serves(case, kind)]
    if "resume elsewhere" in found:
        return ["resume elsewhere"]
    if "resume" in found:
        return [kind for kind in found if kind in BESIDE_RESUME]
    last = [kind for kind in found if kind in ("raise", "kill")]
    return last[:1] or found


def _serves(case: Case, kind: str) -> bool:
    if case["method"] == "elastic" and kind in ("resume", "stop", "nan", "refit"):
        return False  # a run of its own each (tests/gossip/test_elastic*.py)
    if case.stages > 1 and kind in ("prune", "reparametrize", "nan", *(("replace",) if case.gossips else ())):
        return False  # refused when it happens (tests/pipeline); nobody heals pipelines
    if case["island"] == "FullyShard" and kind in ("prune", "reparametrize"):
        return False  # refused when it happens, too (tests/gossip/test_islands_lightning.py)
    if case["loop"] == "Fabric" and kind not in IN_LOOP:
        return False
    return {
        "replace one": case["optimizer"] in ("two", "turns"),
        "replace": case["schedule"] == "none",
        "nan": case["gradient"] == "bowl" and case.gossips and case["island"] == "Solo",
        "apart": case.replicas == case.workers,
        "resume elsewhere": case.workers > 1 and case["method"] != "elastic" and not planned(case.elsewhere),
        "raise": case.workers > 1,
        "kill": case.workers > 1,
    }.get(kind, True)


Pair = tuple[tuple[str, str], tuple[str, str]]


def pairs(case: Case) -> set[Pair]:
    """Of values that it has, and of values and events; where a worker differs, which ends the run, those of that."""
    has = [(axis, value) for axis, value in case.values.items() if value != NONE]
    if differs(case):
        other = ("layout", "one alone") if case["given"] in ("alike", NONE) else ("given", case["given"])
        return {pair for pair in combinations(has, 2) if other in pair}
    has += sorted({("event", event.kind) for event in case.events})
    return set(combinations(has, 2))
