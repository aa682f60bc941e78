"""Combinations are right, or refused by name before the first step: every pair of values, and thousands drawn."""

import os
from collections.abc import Callable, Iterator

import pytest

from tests.packaging.project import ROOT
from tests.together.planted import PLANTED
from tests.together.pool import Pool
from tests.together.search import covering, drawn, smallest, tried
from tests.together.space import Case, pairs, planned

PARTS, DRAWN, SHARE = 36, 3000, 50
QUICK = 5
"""Parts of the covering runs in `make test`; `make thorough` takes all."""
SEED = int(os.environ.get("TOGETHER_SEED", "1"))
"""Of the drawn runs of `make thorough`; the covering ones are always the same."""


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.close()


def failing(cases: list[Case], pool: Pool) -> list[str]:
    """What is wrong, with the smallest run that shows it; of the first few."""
    found = [result for case in cases if (result := tried(case, pool)).fault]
    return [_told(result.case, pool) or f"{result.fault}, but not again: {result.case}" for result in found[:3]]


def _told(case: Case, pool: Pool) -> str:
    if not tried(case, pool).fault:
        return ""
    least = smallest(case, lambda other: bool(tried(other, pool).fault))
    return f"{tried(least, pool).fault}: python -m tests.together --case '{least}'"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "part", [*range(QUICK), *(pytest.param(part, marks=pytest.mark.thorough) for part in range(QUICK, PARTS))]
)
def test_every_pair_that_a_plan_can_have_is_right_or_refused(pool: Pool, part: int) -> None:
    assert not failing(covering(0)[part::PARTS], pool)


@pytest.mark.thorough
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("part", range(DRAWN // SHARE))
def test_drawn_runs_are_right_or_refused(pool: Pool, part: int) -> None:
    cases = list(drawn(DRAWN, SEED))
    assert not failing(cases[part * SHARE : (part + 1) * SHARE], pool)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("plant", "text"), PLANTED, ids=[plant.__name__ for plant, _ in PLANTED])
def test_a_fault_that_is_put_back_is_found(pool: Pool, plant: Callable[[], None], text: str) -> None:
    case = Case.read(text)
    assert not tried(case, pool).fault
    spoiled = Pool()
    try:
        fault = tried(case, spoiled, plant).fault
        assert fault
        assert "plant the fault" not in fault, "what it would change is no more"
    finally:
        spoiled.close()


def test_the_covering_runs_have_every_value() -> None:
    cases = covering(0)
    assert all(not planned(case) for case in cases)
    found = len(set().union(*map(pairs, cases)))
    page = " ".join((ROOT / "CONTRIBUTING.md").read_text().split())
    assert f"{len(cases)} runs have the {found:,} pairs" in page
    assert f"puts {len(PLANTED)} faults back" in page


def test_a_run_is_drawn_again_from_its_seed_and_read_from_its_text() -> None:
    cases = list(drawn(40, 3))
    assert cases == list(drawn(40, 3))
    assert [Case.read(str(case)) for case in cases] == cases


def test_what_does_not_matter_leaves_the_smallest_run() -> None:
    big = Case.read(
        '{"workers": "4", "topology": "Ring()", "delay": "0", "dtype": "float32", "events": [["save", 3, 0]]}'
    )
    least = smallest(big, lambda case: case["delay"] == "0" and case.has("save"))
    assert str(least) == '{"delay": "0", "events": [["save", 3, 0]]}'
