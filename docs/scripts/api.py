"""The tables of docs/api/index.md: the public names of every folder's face, each with its docstring's first line.

The pages of docs/api, too, on which mkdocstrings puts the whole docstrings of one face.

    python docs/scripts/api.py            # prints the tables
    python docs/scripts/api.py --write    # between the marks of the page, and the pages

Reads source text only: neither torch nor Lightning is imported.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from page import ROOT, Page

PAGE, WHOLE = Page(ROOT / "docs" / "api" / "index.md", "api.py"), ROOT / "docs" / "api"
FACES = ("gossip", "compressed", "pipeline", "partial", "spilled", "sweep", "optim", "shared")
DEFINED = (ast.ClassDef, ast.FunctionDef)


def source(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imported(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """(public name, module, name there) of what a face hands on from this package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning_decentral"):
            yield from ((alias.asname, str(node.module), alias.name) for alias in node.names if alias.asname)


def first_sentence(docstring: str) -> str:
    """The first line, and what follows it where the sentence does."""
    line, _, rest = docstring.partition("\n")
    more = " ".join(rest.partition("\n\n")[0].split())
    return line if not line or line[-1] in ".:" or not more else f"{line} {more.partition('. ')[0].rstrip('.')}."


def said(module: str, name: str) -> str:
    """What is called so there, looked up through faces: a docstring's first sentence, or a value's text."""
    tree = ast.parse(source(module).read_text())
    for node in tree.body:
        if isinstance(node, DEFINED) and node.name == name:
            return first_sentence(ast.get_docstring(node) or "")
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return f"`{ast.unparse(node.value)}`"
    inner = {public: (place, there) for public, place, there in imported(tree) if place != module}
    return said(*inner[name])


def table(face: str) -> str:
    module = f"lightning_decentral.{face}"
    tree = ast.parse(source(module).read_text())
    lines = ["| name | what it is |", "| --- | --- |"]
    for public, inner, there in sorted(imported(tree)):
        text = said(inner, there)
        shown = f"`{text}`" if formula(text) else text
        lines.append(f"| `{public}` | {bars(shown)} |")
    return f"## `{module}`\n\n" + "\n".join(lines)


def bars(text: str) -> str:
    """The text with other signs for bars, which end a cell: escaped, their backslashes show in code."""
    return text.replace("||", "‖").replace(" | ", " or ").replace("|", "\u2223")


def whole(face: str) -> str:
    """The page of a face. A face hands its names on when they are asked for, so mkdocstrings needs to be told them."""
    module = f"lightning_decentral.{face}"
    names = sorted(public for public, _, _ in imported(ast.parse(source(module).read_text())))
    return f"# `{module}`\n\n::: {module}\n    options:\n      members:\n" + "".join(f"        - {n}\n" for n in names)


def formula(text: str) -> bool:
    """Formulas hold what Markdown would read as emphasis or HTML, backticks aside."""
    return "`" not in text and any(sign in text for sign in "_*<|=^")


def generated() -> str:
    return "\n\n".join(table(face) for face in FACES)


if __name__ == "__main__":
    PAGE.show_or_write(generated())
    for face in FACES if "--write" in sys.argv else ():
        (WHOLE / f"{face}.md").write_text(whole(face))
