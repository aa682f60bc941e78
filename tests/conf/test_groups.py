"""One YAML is one constructor call, and each group lists exactly what its module offers."""

import inspect
import re
from types import ModuleType

import pytest
import torch
from hydra.utils import get_object
from lightning.pytorch.callbacks import Callback

from lightning_decentral import callbacks, replicas
from lightning_decentral.gossip import codec, combine, island, weights
from lightning_decentral.gossip import replicas as gossip_replicas
from lightning_decentral.gossip.coding import Coding
from lightning_decentral.multimodel import update
from lightning_decentral.partial import absent, depth, forecast, freezing, order
from lightning_decentral.partial import callbacks as partial_callbacks
from lightning_decentral.pipeline import boundary, measurements, partition, schedule, slicing, stage
from lightning_decentral.recipes import schedules
from tests.conf.groups import CONF, FILES, choices, nodes, parameters, read, unowned
from tests.gossip.topologies import classes

PIPELINE = {
    "strategy/slicing": (slicing, slicing.Slicing),
    "strategy/schedule": (schedule, schedule.Schedule),
    "strategy/partition": (partition, partition.Partition),
    "strategy/measurements": (measurements, measurements.Measurements),
    "strategy/activations": (stage, stage.Activations),
    "strategy/boundary": (boundary, boundary.Boundary),
}

# A group whose files each are one object of this module (or several), under the object's own name.
OBJECT_GROUPS = [
    "strategy/topology",
    "strategy/combine",
    "strategy/combine/rate",
    "strategy/weights",
    "strategy/codec",
    "strategy/island",
    *PIPELINE,
    "strategy/replicas",
    "strategy/depth",
    "strategy/depth/order",
    "strategy/balance",
    "strategy/absent",
    "strategy/update",
    "scheduler",
    "optimizer",
    "callback",
    "model",
]


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def adamw_style(name: str) -> str:
    """A single capital at the end starts no word: AccumAdamW is accum_adamw."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])", "_", name).lower()


def concrete_classes(module: ModuleType, kind: type) -> set[str]:
    package = module.__name__.rpartition(".")[0]
    found = [c for _, c in inspect.getmembers(module, inspect.isclass) if c.__module__.startswith(package)]
    public = [c for c in found if issubclass(c, kind) and c is not kind and not inspect.isabstract(c)]
    return {c.__name__ for c in public if not c.__name__.startswith("_")}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(CONF)))
def test_every_key_belongs_to_its_constructor(file):
    for path, node in nodes(read(file)):
        assert unowned(node) == set(), f"{file.name}: {path or 'top'}"


@pytest.mark.parametrize("group", OBJECT_GROUPS)
def test_file_is_named_as_its_object(group):
    for name in choices(group):
        target = read(CONF / group / f"{name}.yaml")["_target_"].rpartition(".")[2]
        assert name in (snake(target), adamw_style(target), target.lower())


@pytest.mark.parametrize(("group", "module", "kind"), [
    ("strategy/weights", weights, weights.Weights),
    ("strategy/codec", codec, Coding),
    ("strategy/island", island, island.Island),
    *((group, *found) for group, found in PIPELINE.items()),
    ("strategy/depth/order", order, order.Order),
    ("strategy/update", update, update.Update),
])  # fmt: skip
def test_group_lists_its_module(group, module, kind):
    assert choices(group) == {snake(name) for name in concrete_classes(module, kind)}


def test_topology_lists_all_that_can_be_had_from_its_module():
    assert choices("strategy/topology") == {snake(cls.__name__) for cls in classes()}


def test_replicas_lists_its_modules():
    found = concrete_classes(replicas, replicas.Replicas) | concrete_classes(gossip_replicas, replicas.Replicas)
    assert choices("strategy/replicas") == {snake(name) for name in found}


def test_depth_lists_its_modules():
    found = concrete_classes(depth, depth.DepthAssignment) | concrete_classes(freezing, depth.DepthAssignment)
    assert choices("strategy/depth") == {snake(name) for name in found}


@pytest.mark.parametrize(("group", "module", "others"), [
    ("strategy/balance", forecast, {"Balance", "Cost"}),
    ("strategy/absent", absent, {"Absent"}),
])  # fmt: skip
def test_group_lists_the_public_classes(group, module, others):
    found = {c for c, kind in inspect.getmembers(module, inspect.isclass) if kind.__module__ == module.__name__}
    assert choices(group) == {snake(name) for name in found - others}


def test_combine_lists_its_module():
    members = [getattr(combine, name) for name in combine.__all__]
    rules = {c.__name__ for c in members if inspect.isclass(c) and issubclass(c, combine.Combine)}
    rates = {c.__name__ for c in members if inspect.isclass(c) and issubclass(c, combine.Schedule)}
    assert choices("strategy/combine") == {snake(name) for name in rules - {"Combine"}}
    assert choices("strategy/combine/rate") == {snake(name) for name in rates - {"Schedule"}}


def test_scheduler_lists_its_module():
    functions = [f for _, f in inspect.getmembers(schedules, inspect.isfunction) if f.__module__ == schedules.__name__]
    assert choices("scheduler") == {f.__name__ for f in functions if not f.__name__.startswith("_")}


def test_callback_lists_all_of_the_package():
    ours = {snake(name) for module in (callbacks, partial_callbacks) for name in concrete_classes(module, Callback)}
    assert choices("callback") == ours | {"report", "pipeline_report", "model_checkpoint"}


@pytest.mark.parametrize("name", sorted(choices("scheduler") | {f"../optimizer/{n}" for n in choices("optimizer")}))
def test_partial_objects_lack_only_what_training_gives(name):
    node = read(CONF / "scheduler" / f"{name}.yaml")
    required = {n for n, p in parameters(get_object(node["_target_"])).items() if p.default is p.empty}
    assert node["_partial_"] is True
    assert required - set(node) <= {"params", "optimizer", "total_steps", "lr"}


def test_optimizer_defaults_are_accepted_by_torch():
    for name in choices("optimizer"):
        node = read(CONF / "optimizer" / f"{name}.yaml")
        options = {k: float(v) if isinstance(v, str) else v for k, v in node.items() if not k.startswith("_")}
        optimizer = get_object(node["_target_"])([torch.zeros(2, 2, requires_grad=True)], **options)
        assert optimizer.param_groups[0]["lr"] == options["lr"]
