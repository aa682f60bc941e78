"""Docstrings begin with what the thing is or does: a noun, an imperative or the formula, no fragment of a sentence."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.docs.pages import ROOT

FRAGMENT = re.compile(
    r"(Of|Where|What|Who|As|So|By|In|On|To|For|With|Whether|Those|These|That|How|When|Until|From|At|Within|Around|Not)\b"
)
"""A first word that leans on the name above it ("`seconds`: Of one message") where a tooltip shows no name."""
AT_MOST = {"lightning_decentral": 5, "benchmarks": 0}


def fragments(source: str) -> Iterator[str]:
    """Names, with first lines, of the functions and classes whose docstrings begin so."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            text = ast.get_docstring(node) or ""
            if FRAGMENT.match(text):
                yield f"{node.name}: {text.splitlines()[0]}"


@pytest.mark.parametrize("folder", AT_MOST)
def test_docstrings_begin_with_a_noun_or_a_verb(folder: str) -> None:
    found = [f"{p}: {line}" for p in sorted((ROOT / folder).rglob("*.py")) for line in fragments(p.read_text())]
    assert len(found) <= AT_MOST[folder], "\n".join(found)
    assert not [line for line in found if ": Of " in line]


def test_a_fragment_is_found() -> None:
    method, function = '    def f(self):\n        """Asynchronous sends."""\n', 'def g():\n    """Of one."""\n'
    source = f'class A:\n    """As it is."""\n{method}{function}'
    assert [*fragments(source)] == ["A: As it is.", "g: Of one."]
