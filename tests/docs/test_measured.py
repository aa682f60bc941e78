"""The page of measurements is short and shows the committed results."""

import re

import pytest

from loss.asleep_tables import Asleep
from loss.tables import STRONGEST
from pages import measured
from pages.choosing import result
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "measured.md").read_text()


@pytest.mark.parametrize("table", measured.TABLES, ids=lambda table: table.__name__)
def test_the_page_shows_the_committed_tables(table) -> None:  # type: ignore[no-untyped-def]
    assert table() in PAGE


@pytest.mark.parametrize("table", measured.ELASTIC, ids=lambda table: table.__name__)
def test_the_elastic_guide_shows_them_too(table) -> None:  # type: ignore[no-untyped-def]
    assert table() in (ROOT / "docs" / "elastic.md").read_text()


@pytest.mark.parametrize("table", measured.NOTES, ids=lambda table: table.__name__)
def test_the_notes_show_the_others(table) -> None:  # type: ignore[no-untyped-def]
    assert table() in (ROOT / "benchmarks" / "notes.md").read_text()


def test_large_rounds_take_what_their_bytes_take() -> None:
    over = [float(line.rstrip(" |").rpartition(" ")[2]) for line in measured.device().splitlines()[2:]]
    *large, small = over
    assert max(large) < 1.25 < small


def test_on_four_hosts_gossip_gains_four_fifths_and_misses_loss_per_step() -> None:
    found = Asleep(result("loss-per-second-asleep-2-cores.json"), "gpt", 4)
    accounts = [found.account(found.losses()[STRONGEST], rate) for rate in found.table.rates]
    assert [round(one.share, 1) for one in accounts if one] == [0.8] * 4
    slow = [one for one in accounts[:3] if one]
    assert all(one.by_exposed > 0.97 and one.by_steps < 0.85 for one in slow), "its bytes are hidden"


def test_it_is_short() -> None:
    assert len(re.findall(r"\w\S*", PAGE.replace("|", " "))) <= 1500


def test_its_sentences_are_those_of_the_tables() -> None:
    cells = [line.strip("| ").split(" | ") for line in measured.forecasts().splitlines()[2:]]
    assert max(float(off.rstrip(" %")) for *_, off in cells) < 7
    slices = [line.strip("| ").split(" | ") for line in measured.pipeline().splitlines()[3:]]
    assert all(0.87 < float(found) / float(bound) <= 0.94 for _, bound, found in slices)
    assert "processor AMD EPYC, cores 2" in " ".join(PAGE.split())
    assert {"AMD EPYC"} == {result(f"{name}-2-cores.json")["hardware"]["processor"] for name in ("overhead", "sweep")}
