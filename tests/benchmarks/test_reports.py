"""Every result that has a report makes it, by the module that measured it."""

import pytest

from pages.reports import MADE_BY, maker, names, report
from tests.docs.numbers import RESULTS


def test_every_maker_has_results_and_the_longest_beginning_counts() -> None:
    assert {maker(name) for name in names()} == {*MADE_BY.values()}
    assert maker("quality-codec-2-cores") == "quality.codec"
    assert maker("quality-2-cores") == "quality.against_ddp"
    assert maker("rehearsed-cost-2-cores") is None


@pytest.mark.parametrize("name", names())
def test_a_report_says_on_what_it_was_measured_and_has_a_table(name: str) -> None:
    text = report(name)
    assert text.count("\n| --- |") >= 1
    assert "processor" in text or name.startswith("rehearsed")
    assert text.endswith("\n")


def test_reports_are_not_committed_and_a_wrong_name_is_refused() -> None:
    assert not list(RESULTS.glob("*.md"))
    with pytest.raises(KeyError, match="there is no report of coffee: give one of cluster-accuracy-2-cores, "):
        report("coffee")
