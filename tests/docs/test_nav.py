"""The nav is short, holds every page, and what isn't on the site links to files that exist."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mkdocs.utils.yaml import yaml_load

from tests.docs.pages import PAGES, ROOT, name

NAV = yaml_load((ROOT / "mkdocs.yml").read_text())["nav"]
SECTIONS = ["Start", "Choose", "Guides", "Plan", "Reference", "Measured", "Inside"]
CODE = ("lightning_decentral", "hydra_plugins", "recipes", "benchmarks", "docs")
BESIDE_RESULTS = sorted((ROOT / "benchmarks").glob("*.md"))


def pages(entries: list[dict[str, Any]], depth: int = 1) -> Iterator[tuple[int, str]]:
    """(depth, file) of every page."""
    for entry in entries:
        for what in entry.values():
            yield from pages(what, depth + 1) if isinstance(what, list) else [(depth, what)]


def test_every_page_has_one_place() -> None:
    placed = [page for _, page in pages(NAV)]
    assert sorted(placed) == sorted(str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md"))


def test_the_first_two_levels_hold_eighteen_pages_at_most() -> None:
    assert sum(depth <= 2 for depth, _ in pages(NAV)) <= 18
    assert [next(iter(entry)) for entry in NAV] == SECTIONS


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", head).strip().lower()) for head in heads}


@pytest.mark.parametrize("page", [page for page in [*PAGES, *BESIDE_RESULTS] if page.exists()], ids=name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    """mkdocs looks at docs/ only."""
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not link.startswith(("http:", "https:")):
            file, _, anchor = link.partition("#")
            target = (page.parent / file).resolve() if file else page
            assert target.is_file(), link
            assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", BESIDE_RESULTS, ids=name)
def test_tests_that_a_page_names_exist(page: Path) -> None:
    named = set(re.findall(r"\btests/[\w/]+\.py\b", page.read_text()))
    assert not [test for test in named if not (ROOT / test).is_file()]


def test_pages_that_the_code_names_exist() -> None:
    """In messages, docstrings and comments."""
    written = [path.read_text() for folder in CODE for path in (ROOT / folder).rglob("*.py")]
    named = {page for text in written for page in re.findall(r"\b((?:docs|benchmarks)/[\w./-]+\.md)\b", text)}
    assert named
    assert all((ROOT / page).is_file() for page in named)
