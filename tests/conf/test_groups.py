"""One YAML is one constructor call, and each group lists exactly the subclasses of its base that a face exports."""

import inspect
import re
from importlib import import_module
from types import ModuleType

import pytest
import torch
from hydra.utils import get_object
from lightning.pytorch.callbacks import Callback
from torch.optim import Optimizer

from lightning_decentral import gossip, optim, partial, pipeline, spilled
from lightning_decentral.recipes import schedules
from tests.conf.groups import CONF, FILES, choices, nodes, parameters, read, unowned
from tests.exported import concrete

# group: the faces whose public subclasses it lists, and their base class (and one that stands where it does)
GROUPS: dict[str, tuple[tuple[ModuleType, ...], type | tuple[type, ...]]] = {
    "strategy/topology": ((gossip,), gossip.Topology),
    "strategy/combine": ((gossip,), (gossip.Combine, gossip.ConsensusControl)),
    "strategy/combine/rate": ((gossip,), gossip.RateSchedule),
    "strategy/weights": ((gossip,), gossip.Weights),
    "strategy/codec": ((gossip,), gossip.Codec),
    "strategy/island": ((gossip,), gossip.Island),
    "strategy/elastic": ((gossip,), (gossip.Elastic,)),
    "strategy/elastic/asynchronous": ((gossip,), (gossip.Asynchronous,)),
    "strategy/slicing": ((pipeline,), pipeline.Slicing),
    "strategy/schedule": ((pipeline,), pipeline.Schedule),
    "strategy/partition": ((pipeline,), pipeline.Partition),
    "strategy/activations": ((pipeline,), pipeline.Activations),
    "strategy/boundary": ((pipeline,), pipeline.Boundary),
    "strategy/replicas": ((pipeline, gossip), pipeline.Replicas),
    "strategy/depth": ((partial,), partial.DepthAssignment),
    "strategy/depth/order": ((partial,), partial.Order),
    "strategy/balance": ((partial,), partial.Balance),
    "strategy/absent": ((partial,), partial.Absent),
    "strategy/update": ((spilled,), spilled.Update),
}

# A group whose files each are one object of this module (or several), under the object's own name.
OBJECT_GROUPS = [*GROUPS, "scheduler", "optimizer", "callback", "model"]


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def adamw_style(name: str) -> str:
    """A single capital at the end starts no word: AccumAdamW is accum_adamw."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])", "_", name).lower()


def public(face: ModuleType, kind: type | tuple[type, ...]) -> set[str]:
    """Names of the concrete subclasses that a face exports."""
    return {cls.__name__ for cls in concrete(face, kind)}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(CONF)))
def test_every_key_belongs_to_its_constructor(file):
    for path, node in nodes(read(file)):
        assert unowned(node) == set(), f"{file.name}: {path or 'top'}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(CONF)))
def test_every_target_of_ours_is_an_export_of_a_face(file):
    for _, node in nodes(read(file)):
        face, _, name = node["_target_"].rpartition(".")
        if face.startswith("lightning_decentral") and ".recipes" not in face:
            assert face.count(".") <= 1, "a face of a method, not a module of it"
            assert name in import_module(face).__all__


@pytest.mark.parametrize("group", OBJECT_GROUPS)
def test_file_is_named_as_its_object(group):
    for name in choices(group):
        target = read(CONF / group / f"{name}.yaml")["_target_"].rpartition(".")[2]
        assert name in (snake(target), adamw_style(target), target.lower())


@pytest.mark.parametrize("group", GROUPS)
def test_group_lists_the_public_subclasses_of_its_base(group):
    faces, base = GROUPS[group]
    assert choices(group) == {snake(name) for face in faces for name in public(face, base)}


def test_optimizer_lists_ours_and_torchs():
    ours = {adamw_style(name) for name in public(optim, Optimizer)}
    assert choices("optimizer") == ours | {name for name in choices("optimizer") if _target("optimizer", name)}


def _target(group: str, name: str) -> bool:
    """Whether it is torch's."""
    return read(CONF / group / f"{name}.yaml")["_target_"].startswith("torch.optim.")


def test_scheduler_lists_its_module():
    functions = [f for _, f in inspect.getmembers(schedules, inspect.isfunction) if f.__module__ == schedules.__name__]
    assert choices("scheduler") == {f.__name__ for f in functions if not f.__name__.startswith("_")}


def test_callback_lists_all_of_the_package():
    ours = {snake(name) for face in (gossip, partial, pipeline) for name in public(face, Callback)}
    assert choices("callback") == ours | {"model_checkpoint"}


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
