"""What code says to its readers: docstrings' first sentences, and the texts of errors."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.docs.pages import ROOT

CODE = ("lightning_decentral", "hydra_plugins", "recipes", "benchmarks", "docs/scripts")
DEFINED = (ast.Module, ast.ClassDef, ast.FunctionDef)


def words(text: str) -> int:
    """A span of code is one word."""
    return len(re.findall(r"\w\S*", re.sub(r"(`+).+?\1", "Code", text)))


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+", " ".join(text.split()))


def first_sentence(docstring: str) -> str:
    return sentences(docstring.partition("\n\n")[0])[0]


def shown(text: ast.expr) -> str:
    """A constant's text, an f-string's with one word in the place of each value; sums of both; otherwise nothing."""
    if isinstance(text, ast.Constant):
        return str(text.value)
    if isinstance(text, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "value" for part in text.values)
    return shown(text.left) + shown(text.right) if isinstance(text, ast.BinOp) else ""


def docstrings(tree: ast.AST) -> Iterator[str]:
    yield from (ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, DEFINED))


def errors(tree: ast.AST) -> Iterator[str]:
    """Of whatever is raised by a call."""
    raised = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    yield from (shown(call.args[0]) for call in raised if isinstance(call, ast.Call) and call.args)


def files() -> list[Path]:
    return [path for folder in CODE for path in sorted((ROOT / folder).rglob("*.py"))]
