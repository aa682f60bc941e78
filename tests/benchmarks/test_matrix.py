"""Clean environments: what is asked of pip, and that the page shows what was run."""

import json
import os
import re
from pathlib import Path

import pytest

import matrix
from tests.packaging.project import PROJECT

ROWS = json.loads(matrix.RESULTS.read_text())


def test_requirements_are_those_of_the_package_at_their_bounds() -> None:
    asked = matrix.requirements()
    extras = [one for extra in matrix.EXTRAS for one in PROJECT["optional-dependencies"][extra]]
    assert asked == [*PROJECT["dependencies"], *extras]
    oldest = [matrix.PARTS["oldest"].asked(one) for one in asked]
    assert oldest[:2] == ["lightning==2.6.4.*", "torch==2.6.*"]
    assert not [one for one in oldest if ">" in one]
    newest = [matrix.PARTS["newest"].asked(one) for one in asked]
    assert newest[:2] == ["lightning>=2.6.4.dev0", "torch>=2.6.dev0"]  # pre-releases of these alone
    early = [new for new, one in zip(newest, asked, strict=True) if new != one]
    assert {re.split(r"[\[<>=]", one)[0] for one in early} == set(matrix.EARLY)


def test_the_quick_part_ends_well_where_nothing_newer_can_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    assert matrix.quick(tmp_path / "quick").startswith("skipped: pip can't get hydra-core (")


def test_the_page_shows_the_committed_rows() -> None:
    assert set(ROWS) <= set(matrix.PARTS)
    assert f"{matrix.BEGIN}\n{matrix.table(ROWS)}\n{matrix.END}" in matrix.PAGE.read_text()


@pytest.mark.parametrize("name", ROWS)
def test_much_ran_and_both_packages_train(name: str) -> None:
    row = ROWS[name]
    assert row["tests"]["passed"] > 100
    assert (row["wheel"], row["sdist"]) == ("trains", "trains")


def test_a_part_exists_for_each_end_of_the_range() -> None:
    least = PROJECT["requires-python"].removeprefix(">=")
    assert matrix.PARTS["oldest"].python == f"python{least}"
