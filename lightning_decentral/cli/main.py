"""`lightning-decentral`: console commands beside training.

lightning-decentral cuts recipe=gpt strategy.cuts=3
lightning-decentral plan profile.json --workers 64 --per-node 8
lightning-decentral rehearse recipe=gpt workers=4,8 --target 1.45
lightning-decentral topology base_graph --workers 24
lightning-decentral profile recipe=gpt
lightning-decentral placement hosts.json --topology ring
lightning-decentral schedule jobs.yaml --policy lrtf --devices 2
lightning-decentral lobby --workers 2:16
lightning-decentral completion bash

Short, as each command is a module of its own: here they are put together, and mistakes become one line.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from lightning_decentral.cli import (
    completion,
    cuts,
    lobby,
    placement,
    planning,
    profile,
    rehearsing,
    schedule,
    topology,
)
from lightning_decentral.cli.answers import quiet
from lightning_decentral.cli.options import Parser, refuse_unwritable
from lightning_decentral.shared.application import Application
from lightning_decentral.shared.errors import mendable, one_line


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Words of the recipes may stand behind options, too: argparse takes them in front only, and its intermixed parsing
    knows no subcommands."""
    options, behind = parser.parse_known_args(arguments)
    unknown = [word for word in behind if word.startswith("-") or "overrides" not in options]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(behind)}")
    if behind:
        options.overrides = [*options.overrides, *behind]
    return options


def main(application: Application, arguments: Sequence[str] | None = None) -> None:
    """The command, about this application: `recipes/command.py` is the console's."""
    parser = Parser(prog="lightning-decentral", description=__doc__.partition("\n")[0])
    commands: Any = parser.add_subparsers(dest="command", required=True)
    parser.set_defaults(application=application, outputs=())
    for command in (cuts, planning, rehearsing, topology, profile, placement, schedule):
        command.add(commands)
    for answering in commands.choices.values():
        answering.add_argument("--json", action="store_true", help="answer with JSON (docs/commands.md)")
    for silent in (lobby, completion):
        silent.add(commands)
    options = parsed(parser, arguments)
    try:
        refuse_unwritable(options, options.outputs)
        with quiet():
            options.run(options)
    except Exception as error:
        if not mendable(error):
            raise
        sys.exit(f"error: {one_line(error)}")
