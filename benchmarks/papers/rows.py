"""Every row of "Against the papers" that is computed; measured rows run only if an argument names them.

    python benchmarks/papers.py              # all computed rows
    python benchmarks/papers.py terapipe     # one row

Writes `results/paper-ROW.json`; `python benchmarks/pages.py papers` makes the page's table of these.
"""

import ast
from importlib import import_module
from types import ModuleType

from common.entry import parts
from papers.row import write


def computed() -> dict[str, ModuleType]:
    """{name: module} of the rows that a function `row` computes; a measured row has none."""
    trees = {name: ast.parse(path.read_text()).body for name, path in parts("papers").items()}
    functions = {name: {getattr(node, "name", "") for node in body} for name, body in trees.items()}
    return {name: import_module(f"papers.{name}") for name, found in functions.items() if {"row", "main"} <= found}


def main() -> None:
    for module in computed().values():
        write(module.row())
