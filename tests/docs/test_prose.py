"""Source lines and sentences are short: a reader takes a sentence in at once."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, name
from tests.docs.prose import long_lines, long_sentences, outside_fences

BESIDE_RESULTS = sorted((ROOT / "benchmarks").glob("*.md"))
THIRTY = " ".join(["word"] * 30)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_lines_and_sentences_are_short(page: Path) -> None:
    assert not long_lines(page.read_text())
    assert not long_sentences(page.read_text())


@pytest.mark.parametrize("page", BESIDE_RESULTS, ids=name)
def test_lines_beside_the_results_are_short(page: Path) -> None:
    """Notes may have longer sentences."""
    assert not long_lines(page.read_text())


def torn_rows(page: str) -> list[str]:
    """Rows with more or fewer cells than the head of their table."""
    found, cells = [], 0
    for line in outside_fences(page):
        here = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        cells = (cells or here) if here else 0
        found += [line] if here != cells else []
    return found


@pytest.mark.parametrize("page", [*PAGES, *BESIDE_RESULTS], ids=name)
def test_rows_of_a_table_have_equally_many_cells(page: Path) -> None:
    assert not torn_rows(page.read_text())
    assert torn_rows("| a | b |\n| --- | --- |\n| c | d | e |\n") == ["| c | d | e |"]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_tables_show_no_backslash_before_a_bar(page: Path) -> None:
    """In code it would be seen."""
    rows = [line for line in outside_fences(page.read_text()) if line.startswith("|")]
    assert not [line for line in rows if "\\|" in line]


def test_what_is_long_is_found() -> None:
    assert long_sentences(f"{THIRTY}.\n\n- {THIRTY}\n  word: word.\n") == [f"{THIRTY} word: word."]
    assert not long_sentences(f"# {THIRTY} word\n\n| {THIRTY} word |\n\n```text\n{THIRTY} word\n```\n")
    assert not long_sentences(f"{THIRTY[5:]} $a + b$.")
    assert not long_sentences(f"{THIRTY[5:]} `a b c`. [Word](word.md) {THIRTY[5:]}.")
    assert long_lines("a" * 121 + "\n| " + "a" * 130) == ["a" * 121]
