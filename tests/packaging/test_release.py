"""A release says its version once, and everything that repeats it agrees."""

import re

import yaml

from lightning_decentral import __version__
from tests.packaging.project import PROJECT, ROOT

CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
SECTIONS = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", CHANGELOG, re.MULTILINE)


def test_the_changelog_begins_with_what_comes_and_what_is() -> None:
    (unreleased, _), (newest, date), *_ = SECTIONS
    assert (unreleased, newest) == ("Unreleased", __version__)
    assert date
    section = CHANGELOG.partition(f"## [{newest}]")[2].partition("\n## ")[0]
    assert "### What you must change\n" in section


def test_the_citation_is_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == __version__
    assert cited["date-released"] == SECTIONS[1][1]
    assert (cited["title"], cited["license"]) == (PROJECT["name"], PROJECT["license"])


def test_the_version_stands_in_one_place() -> None:
    assert "version" not in PROJECT
    assert PROJECT["dynamic"] == ["version"]
    elsewhere = [*(ROOT / "docs").glob("*.md"), *(ROOT / "conf").rglob("*.yaml"), ROOT / "README.md"]
    naming = [path.name for path in elsewhere if f"lightning-decentral {__version__}" in path.read_text()]
    assert naming == []


def test_the_security_policy_supports_this_minor_version() -> None:
    assert f"fixes: {__version__.rpartition('.')[0]}." in (ROOT / "SECURITY.md").read_text()
