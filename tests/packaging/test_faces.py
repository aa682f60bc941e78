"""Every folder's face says what lives there; its exports are what they are called, and are read when asked for."""

import ast
import pickle
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from lightning.pytorch.strategies import Strategy

from lightning_decentral.shared import MOVED
from tests.packaging.project import ROOT
from tests.packaging.test_floors import PACKAGE, dotted

FACES = sorted(p for p in PACKAGE.rglob("__init__.py") if not {"conf", "recipes"} & set(p.relative_to(PACKAGE).parts))
FILES_READ_FOR_THE_FACE = 4
FILES_READ_FOR_GOSSIP = 75  # a strategy, with all that workers agree on, save and tell each other; it may not grow


def name_of(face: Path) -> str:
    return dotted(face).removesuffix(".__init__")


@pytest.mark.parametrize("face", FACES, ids=name_of)
def test_a_face_says_what_lives_here_and_what_is_public(face: Path) -> None:
    said = ast.get_docstring(ast.parse(face.read_text())) or ""
    assert len(said.splitlines()[0].split()) > 5
    if face.parent != PACKAGE:
        assert "ublic" in said


@pytest.mark.parametrize("face", FACES, ids=name_of)
def test_every_export_is_what_it_is_called(face: Path) -> None:
    module = import_module(name_of(face))
    for name in getattr(module, "__all__", []):
        value = getattr(module, name)
        if isinstance(value, type):
            assert value.__name__ == name
            assert value.__module__.startswith("lightning_decentral.")


def test_what_a_face_does_not_have_is_an_attribute_error() -> None:
    module = import_module("lightning_decentral.gossip")
    with pytest.raises(AttributeError, match="has no attribute 'Circle'"):
        module.Circle  # noqa: B018


def read_by(statement: str) -> list[str]:
    """Files of the package, faces not counted, that a new process reads for this statement."""
    told = f"import sys; {statement}; print(*(m for m in sys.modules if m.startswith('lightning_decentral.')))"
    output = subprocess.run(
        [sys.executable, "-c", told], cwd=ROOT, capture_output=True, text=True, timeout=600, check=True
    ).stdout
    faces = {name_of(face) for face in FACES}
    return sorted(set(output.split()) - faces)


@pytest.mark.thorough
def test_a_gossip_run_reads_what_it_uses() -> None:
    files = read_by("from lightning_decentral.gossip import GossipStrategy")
    assert len(files) <= FILES_READ_FOR_GOSSIP, files
    assert len(read_by("import lightning_decentral.gossip")) <= FILES_READ_FOR_THE_FACE
    methods = {name.split(".")[1] for name in files}
    assert methods == {"gossip", "shared"}


@pytest.mark.parametrize("method", ["compressed", "gossip", "partial", "pipeline", "spilled"])
def test_a_strategy_has_at_most_two_bases_of_ours(method: str) -> None:
    # What it is made of are parts: objects with tests of their own.
    module = import_module(f"lightning_decentral.{method}.strategy")
    found = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__]
    strategies = [c for c in found if issubclass(c, Strategy)]
    assert strategies
    for strategy in strategies:
        ours = [c for c in strategy.__mro__[1:] if c.__module__.startswith("lightning_decentral.")]
        assert len(ours) <= 2, ours


OLD = (
    "elastic.option.Elastic",
    "gossip.compute.combine.momentum.QuasiGlobalMomentum",
    "gossip.compute.combine.push_sum.PushSum",
    "gossip.compute.combine.rate.LearningRatePower",
    "gossip.compute.combine.relay_sum.RelaySum",
    "gossip.compute.combine.rule.MessageForm",
    "gossip.callbacks.StartSummary",
    "gossip.plan.topology.nodes.AlternatingExponentialRing",
    "gossip.wire.island.Solo",
    "partial.plan.depth_order.Cyclic",
    "pipeline.compute.activation_codec.Int8Activations",
    "shared.compute.codec.difference.TopK",
    "shared.compute.codec.packed.Int4",
    "shared.compute.codec.quantize.Plain",
)
"""Public classes by the modules that had them in 0.2.0."""


@pytest.mark.parametrize("old", OLD)
def test_values_in_pickles_of_earlier_versions_are_found(old: str) -> None:
    module, _, name = f"lightning_decentral.{old}".rpartition(".")
    found = pickle.loads(f"c{module}\n{name}\n.".encode())
    face = import_module(f"lightning_decentral.{old.partition('.')[0].replace('shared', 'gossip')}")
    assert found is getattr(face, name)


BASES = (
    "gossip.plan.traffic.Round",
    "pipeline.stage_training.StageTraining",
    "pipeline.training_step.TrainingStep",
    "shared.checkpoint.replica.ReplicaCheckpoints",
    "shared.checkpoint.worker.Checkpoints",
    "shared.replica.ReplicaStrategy",
    "shared.workers.WorkersStrategy",
)
"""Classes that extenders import, by the modules that had them in 0.2.0; in no face."""


@pytest.mark.parametrize("old", BASES)
def test_bases_are_imported_by_their_former_modules(old: str) -> None:
    module, _, name = f"lightning_decentral.{old}".rpartition(".")
    assert isinstance(getattr(import_module(module), name), type)


def test_every_merged_module_is_asked_for() -> None:
    assert {old.rpartition(".")[0] for old in (*OLD, *BASES)} >= MOVED.keys()
