"""The site builds without a warning and a reader without network sees all of it."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return target


@pytest.mark.thorough
def test_every_page_is_built(site: Path) -> None:
    sources = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*.md")}
    built = {path.parent.relative_to(site) for path in site.rglob("index.html")}
    assert {source.parent if source.name == "index" else source for source in sources} == built


FETCHED = (
    r"<(?:script|img|iframe)[^>]*\bsrc=[\"']?(https?:[^\"' >]+)",
    r"<link[^>]*rel=[\"']?stylesheet[^>]*href=[\"']?(https?:[^\"' >]+)",
)


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    pages = {page: page.read_text() for page in site.rglob("*.html")}
    found = [
        (page.parent.name, url) for page, text in pages.items() for part in FETCHED for url in re.findall(part, text)
    ]
    assert not found


def test_names_in_pages_lead_to_their_docstrings(site: Path) -> None:
    link = r'<a class="autorefs[^"]*" href="\.\./(api/\w+/)#([\w.]+)"><code>'
    found = re.findall(link, (site / "gossip" / "index.html").read_text())
    assert ("api/gossip/", "lightning_decentral.gossip.Ring") in found
    assert all(f'id="{anchor}"' in (site / page / "index.html").read_text() for page, anchor in found)


@pytest.mark.skipif(not importlib.util.find_spec("latex2mathml"), reason="the extra `docs` isn't installed: no MathML")
def test_formulas_are_typeset_without_a_script(site: Path) -> None:
    pages = {page: page.read_text() for page in site.rglob("*.html")}
    formulas = [math for text in pages.values() for math in re.findall(r"<math.*?</math>", text, re.DOTALL)]
    assert len(formulas) > 50
    assert not [math for math in formulas if "\\" in math]  # a command that the converter doesn't know
    assert not [page for page, text in pages.items() if 'class="arithmatex"' in text]


@pytest.mark.parametrize("given", [{}, {"REPO_URL": "https://repo.test/x", "EDIT_URI": "edit/main/docs/"}], ids=len)
def test_links_to_the_source_are_those_of_the_environment(given: dict[str, str]) -> None:
    unset = {name: text for name, text in os.environ.items() if name not in ("SITE_URL", "REPO_URL", "EDIT_URI")}
    script = "from mkdocs.config import load_config; c = load_config(); print(c.site_url, c.repo_url, c.edit_uri)"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, env={**unset, **given}, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["None", given.get("REPO_URL", "None"), given.get("EDIT_URI", "None")], done.stderr
