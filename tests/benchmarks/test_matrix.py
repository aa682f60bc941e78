"""Clean environments: what is asked of pip, and that the page shows what was run."""

import json

import matrix
import pytest

from tests.packaging.project import PROJECT

ROWS = json.loads(matrix.RESULTS.read_text())


def test_requirements_are_those_of_the_package_at_their_bounds() -> None:
    asked = matrix.requirements()
    extras = [one for extra in matrix.EXTRAS for one in PROJECT["optional-dependencies"][extra]]
    assert asked == [*PROJECT["dependencies"], *extras]
    oldest = [matrix.PARTS["oldest"].asked(one) for one in asked]
    assert oldest[:2] == ["lightning==2.6.4.*", "torch==2.6.*"]
    assert not [one for one in oldest if ">" in one]
    assert [matrix.PARTS["newest"].asked(one) for one in asked] == asked


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
