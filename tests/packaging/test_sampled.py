"""What `make test` leaves out of a costly test."""

from collections.abc import Mapping
from itertools import product

import pytest

from tests.sampled import left_out

Cases = Mapping[str, Mapping[str, object]]


def values_of(cases: Cases) -> set[tuple[str, object]]:
    return {pair for given in cases.values() for pair in given.items()}


@pytest.mark.parametrize("shape", [(3, 2), (2, 2), (4, 1, 3), (2, 2, 2, 2)])
def test_each_value_stays_in_as_few_cases_as_a_crossing_needs(shape: tuple[int, ...]) -> None:
    cases = {str(row): dict(zip("abcd", row, strict=False)) for row in product(*map(range, shape))}
    stay = {name: cases[name] for name in cases.keys() - left_out(cases)}
    assert values_of(stay) == values_of(cases)
    assert len(stay) == max(shape)


@pytest.mark.parametrize("arguments", ["a", "ab"])
def test_of_a_list_one_case_in_four_stays(arguments: str) -> None:
    cases = {name: dict.fromkeys(arguments, name) for name in "123456789"}
    assert cases.keys() - left_out(cases) == {*"159"}


def test_a_case_always_stays() -> None:
    assert left_out({"one": {"a": 1}}) == set()
