"""The site builds without a warning and a reader without network sees all of it."""

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
    assert {Path(".") if source == Path("index") else source for source in sources} == built


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
