"""Options of the commands: a wrong option is one line, what can't be written is refused before it is measured."""

import argparse
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import NoReturn

from lightning_decentral.shared.figure import new_figure


class Parser(argparse.ArgumentParser):
    """Says one line, not how the command is used."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}: see {self.prog} --help\n")


def whole(text: str) -> int:
    """An argument of the command line as a whole number. ArgumentTypeError for another one."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number such as 8, got {text!r}") from None


def number(text: str) -> float:
    """An argument of the command line as a finite number. ArgumentTypeError for another one."""
    try:
        found = float(text)
    except ValueError:
        found = float("nan")
    if isfinite(found):
        return found
    raise argparse.ArgumentTypeError(f"must be a number such as 0.5, got {text!r}")


def refuse_below(least: int, options: Mapping[str, float | None]) -> None:
    """ValueError for a number that is given and lower."""
    for word, value in options.items():
        if value is not None and value < least:
            raise ValueError(f"{word} must be at least {least}, got {value}: give {word} {max(least, 1)} or more")


def refuse_unwritable(options: argparse.Namespace, words: Sequence[str]) -> None:
    """ValueError for a file that couldn't be written in the end.

    Args:
        words: the options that name files to write.
    """
    for word in words:
        path = getattr(options, word)
        if path is not None:
            _refuse(word, Path(path))


def _refuse(word: str, path: Path) -> None:
    done, there = "drawn" if word == "plot" else "written", path.exists()
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        why = f"{error.strerror}: name a file in a folder that is there and may be written to"
        raise ValueError(f"--{word} {path} can't be {done}: {why}") from None
    if not there:
        path.unlink()
    if word == "plot":
        _refuse_suffix(path)


def _refuse_suffix(path: Path) -> None:
    known = ", ".join(sorted(new_figure(1, 1).canvas.get_supported_filetypes()))
    if path.suffix.removeprefix(".").lower() not in known.split(", "):
        raise ValueError(f"--plot {path} can't be drawn: no format {path.suffix!r}: use one of {known}")
