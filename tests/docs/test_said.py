"""Docstrings begin with a short sentence, and errors have no long ones."""

import ast

from tests.docs import said
from tests.docs.pages import ROOT
from tests.docs.prose import WORDS

TREES = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in said.files()}


def test_docstrings_begin_with_a_short_sentence() -> None:
    found = [(name, one) for name, tree in TREES.items() for one in map(said.first_sentence, said.docstrings(tree))]
    assert len(found) > 1000
    assert not [one for one in found if said.words(one[1]) > WORDS]


def test_errors_have_short_sentences() -> None:
    found = [(name, one) for name, tree in TREES.items() for text in said.errors(tree) for one in said.sentences(text)]
    assert len(found) > 200
    assert not [one for one in found if said.words(one[1]) > WORDS]


def test_what_is_long_is_found() -> None:
    long = "word " * 31
    tree = ast.parse(f'def f():\n    """{long}.\n\n    {long}"""\n    raise ValueError(f"{{f}} {long}" + "and more")\n')
    assert [said.words(said.first_sentence(one)) for one in said.docstrings(tree)] == [0, 31]
    assert [said.words(one) for one in said.errors(tree)] == [34]
    assert said.words("`a b c` is one word. Two.") == 5
