"""What the import contracts can't see: submodules of torch, and modules that nobody put on a floor."""

import ast
from pathlib import Path

import pytest

from tests.packaging.project import PYPROJECT, ROOT

PACKAGE = ROOT / "lightning_decentral"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")

# Folders that may know methods: their own, and those that choose between them.
KNOWING = ("gossip", "partial", "pipeline", "multimodel", "planning", "commands")

# What users watch may read what a method offers.
WATCHING = {f"lightning_decentral.{name}" for name in ("callbacks", "report", "figure", "loggers", "cli")}


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def contracts() -> tuple[list[set[str]], list[set[str]]]:
    """(floors from the binding down to the plan, the modules of each prohibition)."""
    layers, *prohibitions = PYPROJECT["tool"]["importlinter"]["contracts"]
    floors = [set("".join(layer.split()).split(":")) for layer in layers["layers"]]
    return floors, [set(contract["source_modules"]) for contract in prohibitions]


def torch_distributed(source: str) -> list[int]:
    """Lines that import torch.distributed or reach it as an attribute of torch."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        named = {
            ast.Import: lambda n: [alias.name for alias in n.names],
            ast.ImportFrom: lambda n: [f"{n.module}.{alias.name}" for alias in n.names],
            ast.Attribute: lambda n: [ast.unparse(n)],
        }.get(type(node), lambda n: [])(node)
        if any(f"{name}.".startswith("torch.distributed.") for name in named):
            lines.append(node.lineno)
    return lines


def test_every_module_stands_on_one_floor() -> None:
    floors, _ = contracts()
    assert sorted(module for floor in floors for module in floor) == [dotted(path) for path in MODULES]


def test_prohibitions_cover_their_floors() -> None:
    (binding, wire, rule, plan), (without_torch, without_lightning, shared) = contracts()
    assert without_torch == plan
    assert without_lightning == wire | rule
    assert shared == {m for m in binding | wire | rule if m.split(".")[1] not in KNOWING} - WATCHING


# The transport moves messages; shards asks FSDP, which moves its own.
TALKING = ("transport.py", "shards.py")


@pytest.mark.parametrize("path", [path for path in MODULES if path.name not in TALKING], ids=dotted)
def test_only_the_transport_and_shards_call_torch_distributed(path: Path) -> None:
    assert torch_distributed(path.read_text()) == []


def test_the_transport_is_seen_to_call_it() -> None:
    assert torch_distributed((PACKAGE / "transport.py").read_text())
    assert torch_distributed("from torch import distributed\n") == [1]
    assert torch_distributed("import torch\ntorch.distributed.barrier()\n") == [2, 2]
