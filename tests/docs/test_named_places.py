"""What docstrings and pages name in backticks is there: modules, folders, files and classes of the package."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.packaging.project import ROOT
from tests.packaging.test_floors import MODULES, PACKAGE, dotted

PAGES = [ROOT / "docs" / "how-it-works.md", ROOT / "docs" / "extending.md"]
CODE = re.compile(r"(?<!`)`([\w./]+)(?:\([^`]*\))?`(?!`)")
OUTSIDE = {"Fabric", "completion", "ddp", "gpt", "lightning", "savers", "shard_parallel", "transformers"}
"""Names of other packages, of commands and of options."""
FILES = re.compile(r"^(conf|DIR|\.workers)/|\.toml$")
"""What a user writes, or a run does."""
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


@cache
def known() -> tuple[set[str], set[str]]:
    """(classes and functions that the package defines, all names that its code has)"""
    trees = [ast.parse(path.read_text()) for path in MODULES]
    defined, named = set(), set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            defined.add(node.name)
        for field in ("id", "attr", "arg", "name", "module"):
            named.update(str(getattr(node, field, None) or "").split("."))
    return defined, defined | named


def there(place: Path) -> bool:
    return place.is_dir() or place.with_suffix(".py").is_file()


def stale(text: str, folders: list[Path], face: bool = False) -> Iterator[str]:
    """Names in backticks that nothing has, seen from these folders.

    Args:
        face: the text is a folder's: its plain names are modules, or names that something defines.
    """
    defined, named = known()
    for name in dict.fromkeys(CODE.findall(text)):
        if name in OUTSIDE or FILES.search(name):
            continue
        path, slash, inner = name.removesuffix(".py").rstrip("/").rpartition("/")
        first, *rest = inner.split(".")
        place, found = f"{path}{slash}{first}", {*rest} <= named
        if slash or name.endswith(".py") or any(there(folder / place) for folder in folders):
            found |= any(there(folder.joinpath(place, *rest[:1])) for folder in folders)
            found &= any(there(folder / place) for folder in folders)
        else:
            found = first in (defined if face and first.islower() else named) or first.isnumeric()
        if not found:
            yield name


def seen_from(path: Path) -> list[Path]:
    below = path.parent.rglob("*") if path.name == "__init__.py" and path.parent != PACKAGE else ()
    return [*(f for f in path.parents if f == ROOT or ROOT in f.parents), *(f for f in below if f.is_dir())]


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_a_docstring_names_what_is_there(path: Path) -> None:
    said = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert [*stale(said, seen_from(path), path.name == "__init__.py")] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_what_is_there(page: Path) -> None:
    assert [*stale(FENCED.sub("", page.read_text()), [PACKAGE, ROOT])] == []


def test_a_stale_name_is_seen() -> None:
    text = (
        "`strategy`, `nowhere` of `wire/peer`, `wire/no.py`, `wire.nowhere`, `Nobody`, `GossipStrategy`, `peer.Nobody`"
    )
    found = ["nowhere", "wire/no.py", "wire.nowhere", "Nobody", "peer.Nobody"]
    assert [*stale(text, [PACKAGE / "gossip"], face=True)] == found
