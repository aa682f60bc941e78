"""constraints.txt pins every direct dependency, inside the range that pyproject.toml promises."""

import pytest
from packaging.requirements import Requirement

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
