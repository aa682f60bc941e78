"""Console of the commands: reads options, and prints answers as tables or JSON.

A wrong option is one line; a file that can't be written is refused before measuring. A table is printed if the screen
is wide enough, otherwise blocks. JSON is the answer's dataclass: its fields in order, nested ones included."""

import argparse
import dataclasses
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from lightning_decentral.shared.plan.figure import new_figure

UNLIMITED, WIDTH = 10_000, 78  # columns
BANNERS = ("lightning.pytorch", "lightning.fabric", "transformers")
Fields = TypeVar("Fields")


class Command(str):
    """A line to paste: never wrapped."""


class Parser(argparse.ArgumentParser):
    """Argument parser whose errors are one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}: see {self.prog} --help\n")


def whole(text: str) -> int:
    """Parse a whole number on the command line. ArgumentTypeError: the text is none."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number such as 8, got {text!r}") from None


def number(text: str) -> float:
    """Parse a finite number on the command line. ArgumentTypeError: the text is none."""
    try:
        found = float(text)
    except ValueError:
        found = float("nan")
    if isfinite(found):
        return found
    raise argparse.ArgumentTypeError(f"must be a number such as 0.5, got {text!r}")


def refuse_below(least: int, options: Mapping[str, float | None]) -> None:
    """Raise ValueError for a given option below `least`."""
    for option, value in options.items():
        if value is not None and value < least:
            raise ValueError(f"{option} must be at least {least}, got {value}: give {option} {least} or more")


def refuse_unwritable(options: argparse.Namespace, names: Sequence[str]) -> None:
    """Raise ValueError, before measuring, for a file that can't be written, named by one of these options."""
    for name in names:
        if getattr(options, name) is None:
            continue
        path = Path(getattr(options, name))
        done, there = "drawn" if name == "plot" else "written", path.exists()
        try:
            with path.open("ab"):
                pass
        except OSError as error:
            why = f"{error.strerror}: name a file in a folder that is there and may be written to"
            raise ValueError(f"--{name} {path} can't be {done}: {why}") from None
        if not there:
            path.unlink()
        known = sorted(new_figure(1, 1).canvas.get_supported_filetypes()) if name == "plot" else []
        if known and path.suffix.removeprefix(".").lower() not in known:
            raise ValueError(f"--plot {path} can't be drawn: no format {path.suffix!r}: use one of {', '.join(known)}")


def write_text(option: str, path: Path, text: str) -> None:
    """Write a text file. ValueError, which names the option: the file can't be written."""
    try:
        path.write_text(text)
    except OSError as error:
        raise ValueError(f"{option} {path} can't be written: {error.strerror}") from None


def answer(options: argparse.Namespace, found: Any, *shown: Table | str) -> None:
    """Print an answer as tables and sentences, or as JSON with --json. `found`: the answer's dataclass, for JSON."""
    if options.json:
        print(json.dumps(dataclasses.asdict(found), default=str, indent=1))
        return
    console = Console(highlight=False)
    for part in shown:
        say(console, part)


def filled(kind: type[Fields], source: object, **own: Any) -> Fields:
    """Make a dataclass of this kind from `own`, and from the source's fields with equal names."""
    names = [field.name for field in dataclasses.fields(kind) if field.name not in own]  # type: ignore[arg-type]
    return kind(**own, **{name: getattr(source, name) for name in names})


def say(console: Console, part: Table | str) -> None:
    """Print a sentence, wrapped between words on a terminal alone, or a table whose names are never cut."""
    if isinstance(part, str):
        console.print(part, soft_wrap=isinstance(part, Command) or not console.is_terminal, markup=False)
    elif Measurement.get(console, console.options.update(max_width=UNLIMITED), part).maximum <= console.width:
        console.print(part)
    else:
        for line in blocks(part):
            console.print(line, soft_wrap=True, markup=False)


def numbers_table(name: str, *headings: str, title: str | None = None) -> Table:
    """Make a table of rows with a name, to the left, and numbers, to the right."""
    table = Table(name, title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def blocks(table: Table) -> Iterator[str]:
    """Format each row as its first cell and, below, `heading value` for all other nonempty cells."""
    if table.title:
        yield str(table.title)
    headings = [str(column.header) for column in table.columns]
    for row in zip(*(column.cells for column in table.columns), strict=True):
        name, *values = map(str, row)
        yield " ".join(name.split("\n"))
        pairs = [f"{heading} {value}".strip() for heading, value in zip(headings[1:], values, strict=True) if value]
        # Several in a line of at most `WIDTH` characters, a longer one alone.
        line = f"  {pairs[0]}" if pairs else ""
        for pair in pairs[1:]:
            if len(joined := f"{line}, {pair}") > WIDTH:
                yield line
                joined = f"  {pair}"
            line = joined
        if line:
            yield line


@contextmanager
def quiet() -> Iterator[None]:
    """Silence other libraries' messages about a run meanwhile."""
    with ExitStack() as stack:
        for name in BANNERS:
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        stack.enter_context(warnings.catch_warnings())
        for name in ("lightning", "transformers", "torch"):
            warnings.filterwarnings("ignore", module=rf"{name}(\.|$)")
        yield
