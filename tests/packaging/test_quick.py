"""Tests that `make quick` names are there: one that isn't would be left out without a word."""

import re

import pytest

from tests.packaging.project import ROOT
from tests.quick import QUICK


@pytest.mark.parametrize("name", [name for names in QUICK.values() for name in names])
def test_what_quick_names_is_there(name: str) -> None:
    file, _, function = name.partition("::")
    assert re.search(rf"^def {function.partition('[')[0]}\(", (ROOT / file).read_text(), re.MULTILINE), name
