"""Answer of a command: a table that the screen is wide enough for, otherwise blocks; JSON; no banners in front.

JSON is the answer's dataclass: its fields, in their order, all nested ones, too.
"""

import argparse
import dataclasses
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

UNLIMITED = 10_000  # columns
BANNERS = ("lightning.pytorch", "lightning.fabric", "transformers")


def answer(options: argparse.Namespace, found: Any, *shown: Table | str) -> None:
    """Print it for people, or as JSON where that was asked for.

    Args:
        found: a dataclass, the same in numbers.
    """
    if options.json:
        print(json.dumps(dataclasses.asdict(found), default=str, indent=1))
        return
    console = Console(highlight=False)
    for part in shown:
        say(console, part)


def say(console: Console, part: Table | str) -> None:
    """A sentence is never cut, and stays one line for those who read it line by line; nor is a name in a table."""
    if isinstance(part, str):
        console.print(part, soft_wrap=True, markup=False)
    elif Measurement.get(console, console.options.update(max_width=UNLIMITED), part).maximum <= console.width:
        console.print(part)
    else:
        for line in blocks(part):
            console.print(line, soft_wrap=True, markup=False)


def blocks(table: Table) -> Iterator[str]:
    """Each row as its first cell and, below it, `heading value` for all others that aren't empty."""
    if table.title:
        yield str(table.title)
    headings = [str(column.header) for column in table.columns]
    for row in zip(*(column.cells for column in table.columns), strict=True):
        name, *values = map(str, row)
        yield name
        pairs = [f"{heading} {value}".strip() for heading, value in zip(headings[1:], values, strict=True) if value]
        yield from _wrapped(pairs)


def _wrapped(pairs: list[str], width: int = 78) -> Iterator[str]:
    """Several in a line of at most `width` characters, a longer one alone."""
    line = ""
    for pair in pairs:
        joined = f"{line}, {pair}" if line else f"  {pair}"
        if line and len(joined) > width:
            yield line
            joined = f"  {pair}"
        line = joined
    if line:
        yield line


@contextmanager
def quiet() -> Iterator[None]:
    """Without what other libraries say about a run: this one is nobody's."""
    with ExitStack() as stack:
        for name in BANNERS:
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        stack.enter_context(warnings.catch_warnings())
        for name in ("lightning", "transformers", "torch"):
            warnings.filterwarnings("ignore", module=rf"{name}(\.|$)")
        yield
