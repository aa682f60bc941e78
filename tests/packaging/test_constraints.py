"""constraints.txt pins every direct dependency, inside the range that pyproject.toml promises; its ends were tried."""

import json

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.packaging.project import PROJECT, ROOT

LINES = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
PINS = [Requirement(line) for line in LINES]
ASKED = [
    Requirement(text)
    for group in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for text in group
    if not text.startswith(PROJECT["name"])
]


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.13"])
@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_pinned_once_and_in_range(asked: Requirement, python: str) -> None:
    there = {"python_version": python}
    pins = [p for p in PINS if p.name == asked.name and (p.marker is None or p.marker.evaluate(there))]
    versions = [next(iter(pin.specifier)).version for pin in pins]
    assert len(versions) == 1, f"{asked.name} is pinned {len(versions)} times for Python {python}"
    assert asked.specifier.contains(versions[0])


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_range_has_no_upper_end(asked: Requirement) -> None:
    assert {spec.operator for spec in asked.specifier} == {">="}


OLDEST = json.loads((ROOT / "benchmarks" / "results" / "matrix.json").read_text())["oldest"]


def tried(asked: Requirement) -> bool:
    """Whether its lower bound is the version that `benchmarks/matrix.py oldest` trained with."""
    least, ran = (Version(text).release for text in (next(iter(asked.specifier)).version, OLDEST[asked.name]))
    return ran[: len(least)] == least


@pytest.mark.parametrize("asked", [asked for asked in ASKED if asked.name in OLDEST], ids=str)
def test_the_least_version_has_trained(asked: Requirement) -> None:
    assert OLDEST["wheel"] == OLDEST["sdist"] == "trains"
    assert tried(asked)


@pytest.mark.parametrize("asked", ["torch>=2.5", "torch>=2.7", "lightning>=2.6.3"])
def test_another_floor_is_seen(asked: str) -> None:
    """torch 2.5 has no `torch.distributed.fsdp.fully_shard`, and its `P2POp` no `group_peer`: nothing imports there."""
    assert not tried(Requirement(asked))
