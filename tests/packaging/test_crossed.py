"""What `make test` leaves out has nothing in it that it doesn't test otherwise."""

from itertools import product
from pathlib import Path

import pytest

from tests.crossed import CROSSED, Case, beyond

TREE = Path(__file__).parents[2]


def values_of(cases: list[Case]) -> set[tuple[str, object]]:
    return {pair for _, given in cases for pair in given.items()}


@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (4, 1, 3), (2, 2, 2, 2)])
def test_each_value_stays_in_as_few_cases_as_a_crossing_needs(shape: tuple[int, ...]) -> None:
    cases = [(str(row), dict(zip("abcd", row, strict=False))) for row in product(*map(range, shape))]
    more = beyond(cases)
    stay = [case for case in cases if case[0] not in more]
    assert values_of(stay) == values_of(cases)
    assert len(stay) == max(shape)


def test_cases_that_are_no_crossing_stay() -> None:
    cases = [("one", {"a": 1, "b": 2}), ("other", {"a": 2, "b": 1})]
    assert beyond(cases) == set()


@pytest.mark.parametrize("name", CROSSED)
def test_what_is_thinned_exists(name: str) -> None:
    file, _, function = name.partition("::")
    assert f"def {function}(" in (TREE / file).read_text()
