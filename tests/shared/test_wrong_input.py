"""Wrong arguments of every public class: one line with parameter, value and remedy, from the constructor itself.

Nothing is written one by one: classes and parameters are those of the faces, and a value is wrong where `fits`, a
second reading of the annotation, says so.
"""

import inspect
import math
import pickle
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from lightning_decentral import (
    CompressedStrategy,
    GossipStrategy,
    PartialBackpropStrategy,
    SpilledStrategy,
    TokenPipelineStrategy,
)
from lightning_decentral.gossip import (
    Auto,
    Elastic,
    Every,
    Gossip,
    GossipReplicas,
    Int8,
    LinearRate,
    Own,
    PushSum,
    Ring,
    Topology,
)
from lightning_decentral.pipeline import Given, Uniform, ZeroBubble
from lightning_decentral.pipeline.wire.executor import Boundary
from lightning_decentral.shared.plan.arguments import checked
from lightning_decentral.shared.plan.kinds import _parts
from lightning_decentral.sweep import WorkPiece
from tests.conf.groups import choices
from tests.exported import concrete

FOLDERS = ("compressed", "gossip", "partial", "pipeline", "spilled", "sweep", "optim")
# Values that the package makes by the thousand and hands to users' parts: nobody writes them.
MADE = {"Action", "Frame", "Job", "Kind", "MessageForm", "PayloadPart", "Recovery", "Turn"}
NEEDED: dict[str, dict[str, Any]] = {
    "AllReduce": {"devices": 2},
    "AlternatingExponentialRing": {"workers_per_node": 2},
    "Chain": {"module": nn.Linear(1, 1), "blocks": []},
    "ConsensusControl": {"target": 0.1},
    "Counted": {"blocks": (1, 1)},
    "DifferenceCompression": {"inner": Int8()},
    "Elastic": {"lobby": "10.0.0.1:29400"},
    "ElasticGossipStrategy": {"elastic": Elastic(lobby="10.0.0.1:29400")},
    "Every": {"steps": 2, "inner": Ring()},
    "FromGraph": {"edges": [[0, 1]]},
    "FullyShard": {"devices": 2},
    "Given": {"lengths": (1, 1)},
    "GossipForecast": {"topology": Ring()},
    "LinearRate": {"last": 0.5, "rounds": 3},
    "MatrixExchange": {"topology": Ring(), "weights": Own(), "size": 4},
    "PeriodicAverage": {"every": 2, "inner": Ring()},
    "PipelineReport": {"directory": "report"},
    "Queue": {"name": "a", "pieces": (WorkPiece(1.0),)},
    "Report": {"directory": "report"},
    "Situation": {"num_stages": 2, "seconds": lambda tokens, before: 1.0},
    "Stream": {"steps": 4, "parts": 2, "inner": Ring()},
    "Table": {"name": "a", "seconds": {1: 1.0}},
    "WorkPiece": {"compute_seconds": 1.0},
}
NEEDED |= {name: {"params": [nn.Parameter(torch.zeros(1))]} for name in ("AccumAdam", "AccumAdamW")}
NEEDED |= {"Muon": {"params": [nn.Parameter(torch.zeros(2, 2))]}}
NEEDED |= {"MomentumWarmup": {"optimizer": torch.optim.SGD([nn.Parameter(torch.zeros(1))], momentum=0.9), "steps": 5}}

WRONG = [
    None, True, 2, -1, 1.5, -0.5, math.nan, math.inf, "no such", "2", b"x", [], [1.5], ["a", 3], {"a": "b"}, {1}, 1j,
    object(), Ring, Int8, Topology, np.zeros(2), np.bool_(True), timedelta(1), lambda: None,
]  # fmt: skip
BELOW_ZERO = {"seed"}  # where a negative number is none of the wrong ones


def fits(value: Any, annotation: Any) -> bool:
    """Whether the value may be given where this is asked for."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    return GENERIC[origin](value, arguments) if origin in GENERIC else fits_class(value, annotation)


def fits_class(value: Any, cls: Any) -> bool:
    if cls is float:
        return type(value) in (int, float) and math.isfinite(value)
    if cls is bool:
        return isinstance(value, (bool, np.bool_))
    if cls in (int, str, type(None)):
        return type(value) is cls
    return cls is Any or (inspect.isclass(cls) and isinstance(value, cls))


def fits_tuple(value: Any, arguments: Any) -> bool:
    if arguments[-1] is ...:
        return fits_list(value, arguments)
    return isinstance(value, (list, np.ndarray)) and len(value) == len(arguments)


def fits_list(value: Any, arguments: Any) -> bool:
    return isinstance(value, (list, np.ndarray)) and all(fits(item, arguments[0]) for item in value)


def fits_union(value: Any, arguments: Any) -> bool:
    return any(fits(value, argument) for argument in arguments)


GENERIC: dict[Any, Callable[[Any, Any], bool]] = {
    Union: fits_union,
    types.UnionType: fits_union,
    Literal: lambda value, arguments: type(value) is str and value in arguments,
    Callable: lambda value, arguments: callable(value),
    tuple: fits_tuple,
    list: fits_list,
    Sequence: fits_list,
    Iterable: lambda value, arguments: isinstance(value, Iterable) and not isinstance(value, str),
    Mapping: lambda value, arguments: isinstance(value, Mapping) and all(fits(key, arguments[0]) for key in value),
}


def classes() -> Iterator[type]:
    for folder in FOLDERS:
        face = import_module(f"lightning_decentral.{folder}")
        yield from (cls for cls in concrete(face) if cls.__name__ not in MADE)


def uses() -> Iterator[tuple[type, str, Any]]:
    """(class, parameter, annotation)"""
    for cls in classes():
        hints = get_type_hints(cls.__init__)
        for name, parameter in inspect.signature(cls).parameters.items():
            if parameter.kind is not parameter.VAR_KEYWORD and name in hints:
                yield cls, name, hints[name]


USES = list(uses())


def negative(value: Any) -> bool:
    return type(value) in (int, float) and value < 0


def wrong(name: str, annotation: Any) -> list[Any]:
    below = annotation is not Any and name not in BELOW_ZERO
    return [v for v in WRONG if not fits(v, annotation) or (below and negative(v))]


def refusal(cls: Any, **arguments: Any) -> str:
    with pytest.raises(ValueError, match=r".") as raised:
        cls(**arguments)
    return str(raised.value)


def shown(value: Any) -> str:
    """The start of how a message shows the value."""
    return " ".join((value.__name__ if inspect.isclass(value) else repr(value)).split())[:20]


IDS = [f"{cls.__module__.split('.')[1]}.{cls.__name__}.{name}" for cls, name, _ in USES]


@pytest.mark.sampled
@pytest.mark.parametrize(("cls", "name", "annotation"), USES, ids=IDS)
def test_a_wrong_value_is_one_line_with_parameter_value_and_remedy(cls: Any, name: str, annotation: Any) -> None:
    for value in wrong(name, annotation):
        line = refusal(cls, **{**NEEDED.get(cls.__name__, {}), name: value})
        assert "\n" not in line
        assert name in line, line
        assert shown(value) in line or any(str(item) in line for item in value), line
        assert ": " in line, line


def test_there_are_more_than_a_thousand_wrong_uses() -> None:
    assert sum(len(wrong(name, annotation)) for _, name, annotation in USES) > 1000


# ---- names ----------------------------------------------------------------------------------------------------------

NAMED = [
    (strategy, parameter, name)
    for strategy, parameters in {
        GossipStrategy: ("topology", "combine", "weights", "codec", "island"),
        PartialBackpropStrategy: ("depth", "balance", "absent"),
        TokenPipelineStrategy: ("slicing", "schedule", "partition", "activations", "boundary", "replicas"),
        SpilledStrategy: ("update",),
    }.items()
    for parameter in parameters
    for name in sorted(choices(f"strategy/{parameter}"))
]

WITHOUT_DEFAULTS = {
    "all_reduce": "write AllReduce(devices=...)",
    "alternating_exponential_ring": "write AlternatingExponentialRing(workers_per_node=...)",
    "consensus_control": "write ConsensusControl(target=...)",
    "counted": "write Counted(blocks=...)",
    "difference_compression": "write DifferenceCompression(inner=...)",
    "every": "write Every(steps=..., inner=...)",
    "from_graph": "FromGraph needs a networkx graph or edges",
    "fully_shard": "write FullyShard(devices=...)",
    "given": "write Given(lengths=...)",
    "int2": "use DifferenceCompression(Int2(",
    "int4": "use DifferenceCompression(Int4(",
    "periodic_average": "write PeriodicAverage(every=..., inner=...)",
    "stream": "write Stream(steps=..., parts=..., inner=...)",
    "top_k": "use DifferenceCompression(TopK(",
}


@pytest.mark.parametrize(("strategy", "parameter", "name"), NAMED)
def test_the_names_of_the_yaml_files_are_accepted(strategy: Any, parameter: str, name: str) -> None:
    """A part with defaults is made; one that needs something says what to write."""
    if name in WITHOUT_DEFAULTS:
        assert WITHOUT_DEFAULTS[name] in refusal(strategy, **{parameter: name})
    else:
        part = getattr(strategy(**{parameter: name}), parameter)
        assert type(part).__name__.lower() == name.replace("_", "")


def test_an_unknown_name_lists_the_known_ones() -> None:
    line = refusal(GossipStrategy, topology="rng")
    assert [name for name in choices("strategy/topology") if name not in line] == []
    assert "GossipStrategy: topology must be a Topology or None, got 'rng': did you mean 'ring'? use one of" in line


@pytest.mark.parametrize(("part", "options", "line"), [
    (SpilledStrategy, {"foo": 1}, "SpilledStrategy has no option 'foo': it has accelerator, blocks, "),
    (SpilledStrategy, {"memory_byte": 1}, "has no option 'memory_byte': did you mean 'memory_bytes'? it has"),
    (GossipStrategy, {"dely": 2}, "(there is no DDP wrapper to take it): did you mean 'delay'? it has"),
    (Every, {"stps": 2}, "Every has no option 'stps': did you mean 'steps'? it has inner, steps"),
])  # fmt: skip
def test_an_unknown_option_is_one_line_with_the_one_that_was_meant(part: Any, options: Any, line: str) -> None:
    assert line in refusal(part, **options)


def test_names_of_parts_are_those_of_the_configuration_files() -> None:
    strategies = [GossipStrategy, CompressedStrategy, PartialBackpropStrategy, SpilledStrategy, TokenPipelineStrategy]
    walked = 0
    for strategy in strategies:
        for option, hint in get_type_hints(inspect.unwrap(strategy.__init__)).items():
            group = Path("conf/strategy", option)
            if group.is_dir():
                own = {name for cls in get_args(hint) for name, part in _parts(cls).items() if ours(part)}
                assert own == {file.stem for file in group.glob("*.yaml")}, option
                walked += 1
    assert walked >= 16


def ours(part: type) -> bool:
    return part.__module__.startswith("lightning_decentral.")


def test_a_name_inside_a_part_and_one_of_the_user() -> None:
    class OwnRing(Topology):
        def sources(self, rank: int, size: int, step: int) -> tuple[int, ...]:
            return Ring().sources(rank, size, step)

    assert Every(8, "ring") == Every(8, Ring())  # type: ignore[arg-type]
    assert isinstance(GossipStrategy(topology="own_ring").topology, OwnRing)  # type: ignore[arg-type]
    assert isinstance(GossipStrategy(topology=OwnRing()).topology, OwnRing)


def test_a_class_that_a_user_extends_keeps_its_name_and_an_interface_has_none() -> None:
    class LongRing(Ring):
        pass

    assert {"ring", "long_ring"} <= set(_parts(Ring))
    assert "boundary" not in _parts(Boundary)
    assert "exact_activations" in _parts(Boundary)


# ---- what is said ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "line"), [
    (lambda: GossipStrategy(topology=Ring),
     "GossipStrategy: topology must be a Topology or None, got Ring: write Ring()"),
    (lambda: GossipStrategy(delay=1.5), "GossipStrategy: delay must be a whole number, got 1.5: leave it out for 1"),
    (lambda: GossipStrategy(delay="2"), "GossipStrategy: delay must be a whole number, got '2': write delay=2"),
    (lambda: GossipStrategy(timeout=30),
     "GossipStrategy: timeout must be a timedelta, got 30: write timedelta(seconds=30)"),
    (lambda: TokenPipelineStrategy(timeout=30),
     "TokenPipelineStrategy: timeout must be a timedelta, got 30: write timedelta(seconds=30)"),
    (lambda: PartialBackpropStrategy(process_group_backend=3),
     "PartialBackpropStrategy: process_group_backend must be a string or None, got 3: give a string or None"),
    (lambda: GossipStrategy(topology="every"),
     "GossipStrategy: topology must be a Topology or None, got 'every': write Every(steps=..., inner=...)"),
    (lambda: SpilledStrategy(resident="head"),
     "SpilledStrategy: resident must be a list, each item a string, got 'head': write ['head']"),
    (lambda: Given([3, "4"]),
     "Given: lengths must be a list, each item a whole number, got [3, '4']: '4' is not a whole number"),
])  # fmt: skip
def test_the_remedy_is_what_was_probably_meant(make: Callable[[], Any], line: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        make()


# ---- what is right stays right --------------------------------------------------------------------------------------


def test_integers_of_numpy_and_torch_and_whole_rates() -> None:
    for three in (3, np.int64(3), torch.tensor(3)):
        assert type(GossipStrategy(delay=three).delay) is int
        assert Every(three, Ring()) == Every(3, Ring())  # type: ignore[arg-type]
    assert Gossip(rate=1) == Gossip(rate=1.0)
    assert type(Gossip(rate=np.float32(0.5)).rate) is float  # type: ignore[arg-type]


def test_lists_and_mappings_of_hydra_become_pythons() -> None:
    assert Given(OmegaConf.create([3, 4])) == Given((3, 4))  # type: ignore[arg-type]
    assert type(SpilledStrategy(resident=OmegaConf.create(["a"])).resident) is list  # type: ignore[arg-type]


def test_checked_classes_keep_signature_and_pickle() -> None:
    assert list(inspect.signature(GossipStrategy).parameters)[:2] == ["topology", "combine"]
    assert list(inspect.signature(Every).parameters) == ["steps", "inner"]
    for part in (Every(2, Ring()), LinearRate(last=0.5, rounds=2), GossipReplicas(combine=PushSum()), Auto()):
        assert pickle.loads(pickle.dumps(part)) == part
    assert isinstance(pickle.loads(pickle.dumps(GossipStrategy(topology="ring"))).topology, Ring)  # type: ignore[arg-type]


def test_a_subclass_with_a_constructor_of_its_own_works() -> None:
    class Logged(GossipStrategy):
        def __init__(self, *, label: str, **options: Any) -> None:
            super().__init__(**options)
            self.label = label

    assert Logged(label="a", delay=2).delay == 2
    assert "delay must be a whole number" in refusal(Logged, label="a", delay="x")


def test_an_annotation_that_cannot_be_asked_takes_anything() -> None:
    @checked
    class Loose:
        def __init__(self, anything: Any, of_typevar: "Sequence[object]" = ()) -> None:
            self.anything = anything

    assert Loose(3).anything == 3


def test_uses_of_a_pipeline() -> None:
    strategy = TokenPipelineStrategy(slicing="uniform", schedule="zero_bubble")  # type: ignore[arg-type]
    assert (strategy.slicing, strategy.schedule) == (Uniform(), ZeroBubble())
