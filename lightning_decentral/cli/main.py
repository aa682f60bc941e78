"""`lightning-decentral`: console commands beside training.

lightning-decentral cuts recipe=gpt strategy.cuts=3
lightning-decentral plan profile.json --workers 64 --per-node 8
lightning-decentral topology base_graph --workers 24
lightning-decentral profile recipe=gpt
lightning-decentral placement hosts.json --topology ring
lightning-decentral schedule jobs.yaml --policy lrtf --devices 2
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from lightning_decentral.cli import placement, profile, schedule, topology
from lightning_decentral.cli import planning as plan
from lightning_decentral.cli.cuts import cuts


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


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="lightning-decentral", description=__doc__.partition("\n")[0])
    commands: Any = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("cuts", help="where partial backprop would cut a recipe, and what that saves")
    command.add_argument("overrides", nargs="*", help="words of recipes/train.py: recipe=vit strategy.cuts=3")
    command.set_defaults(run=lambda options: cuts(options.overrides))
    plan.add(commands)
    topology.add(commands)
    profile.add(commands)
    placement.add(commands)
    schedule.add(commands)
    options = parsed(parser, arguments)
    try:
        options.run(options)
    except Exception as error:
        errors = importlib.import_module("lightning_decentral.recipes.errors")
        if not errors.mendable(error):
            raise
        sys.exit(f"error: {errors.one_line(error)}")


if __name__ == "__main__":
    main()
