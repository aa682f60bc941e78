"""Runs the modules of a folder by the script of the same name: `python benchmarks/network.py speed --hosts 8`."""

import ast
import sys
from importlib import import_module
from pathlib import Path

from common.paths import BENCHMARKS

HELP = ("-h", "--help")


class CannotRun(Exception):
    """Error that ends the command in one line: what this machine lacks, or what was asked for and can't be."""


def parts(question: str) -> dict[str, Path]:
    """{name: file} of the modules in a folder."""
    return {path.stem: path for path in sorted((BENCHMARKS / question).glob("*.py")) if path.stem != "__init__"}


def listed(question: str, usual: str | None) -> str:
    """A line for each command of the folder: those whose docstring shows how to call them."""
    lines = []
    for name, path in parts(question).items():
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        if f"benchmarks/{question}.py" in text:
            word = f"[{name}]" if name == usual else name
            lines.append(f"  {question}.py {word:18} {text.splitlines()[0]}")
    return "\n".join(lines)


def run(question: str, usual: str | None = None) -> None:
    """Calls `main()` of the module that the first argument names, or of the default module."""
    word = sys.argv[1] if sys.argv[1:] else ""
    if word in parts(question):
        sys.argv.pop(1)
    elif word in HELP or not usual:
        print(listed(question, usual), end="\n\n" if usual else "\n")
    name = word if word in parts(question) else usual
    if name is None:
        sys.exit(0 if word in ("", *HELP) else 2)
    if {*HELP} & {*sys.argv[1:]} and "ArgumentParser" not in (text := parts(question)[name].read_text()):
        print(ast.get_docstring(ast.parse(text)))  # it takes no options
        sys.exit(0)
    try:
        sys.exit(import_module(f"{question}.{name}").main())
    except CannotRun as error:
        sys.exit(f"error: {error}")
