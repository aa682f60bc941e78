"""`lightning-decentral`: console commands in addition to training.

Each command is a module of its own: here they are put together, and mistakes become one line. `completion` is here, as
it is made of the parsers themselves: a new command or option is completed by existing."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from time import monotonic
from typing import TYPE_CHECKING, Any

from lightning_decentral.cli.console import Parser, quiet, refuse_unwritable

if TYPE_CHECKING:
    from lightning_decentral.shared.application import Application

COMMANDS = {
    "cuts": ("cuts", "where partial backprop would cut a recipe, and what that saves"),
    "plan": ("planning", "predicted seconds per step of every method on a cluster, the best first"),
    "rehearse": ("rehearsing", "trains n workers in one process: which method reaches a loss fastest"),
    "report": ("report", "losses of several runs over steps, seconds and bytes: a table and a picture"),
    "topology": ("topology", "steps, matrices, spectral gap and consensus curve of a topology"),
    "profile": ("profile", "what a training step of a recipe costs on one device"),
    "placement": ("placement", "which host should get which rank"),
    "schedule": ("schedule", "makespan of many jobs on few devices, simulated and for real"),
    "lobby": ("lobby", "where elastic workers meet: who trains together, who died, who joins"),
    "completion": ("main", "a script by which a shell completes commands and options"),
}
"""{command: (module, help text)}; only the given command's module is imported."""
SILENT = ("lobby", "completion")  # Commands without an answer in JSON.

BASH = """\
_lightning_decentral() {{
  local known current=${{COMP_WORDS[COMP_CWORD]}}
  case "$COMP_CWORD:${{COMP_WORDS[1]}}" in
    1:*) known="{commands}" ;;
{cases}
  esac
  COMPREPLY=($(compgen -W "$known" -- "$current"))
}}
complete -o default -F _lightning_decentral lightning-decentral
"""


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse recipe overrides after options, too: argparse accepts them only before options, and its intermixed parsing
    doesn't support subcommands."""
    options, behind = parser.parse_known_args(arguments)
    unknown = [one for one in behind if one.startswith("-") or "overrides" not in options]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(behind)}")
    if behind:
        options.overrides = [*options.overrides, *behind]
    return options


def main(application: Application, arguments: Sequence[str] | None = None) -> None:
    """Run the command line `lightning-decentral` with this application; `recipes/command.py` is the console script."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = Parser(prog="lightning-decentral", description=__doc__.partition("\n")[0])
    begun = monotonic()  # before a command's imports
    parser.set_defaults(application=application, outputs=(), begun=begun, commands=added(parser, arguments))
    options = parsed(parser, arguments)
    try:
        refuse_unwritable(options, options.outputs)
        with quiet():
            options.run(options)
    except Exception as error:
        # Read here: it knows the errors of Hydra and of Lightning.
        from lightning_decentral.shared.errors import mendable, one_line

        if not mendable(error):
            raise
        sys.exit(f"error: {one_line(error)}")


def added(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> dict[str, argparse.ArgumentParser]:
    """Add the commands' parsers, {command: its parser}; only the given command's parser gets options."""
    commands: Any = parser.add_subparsers(dest="command", required=True)
    for name, (module, what) in COMMANDS.items():
        command = commands.add_parser(name, help=what)
        if name in arguments or "completion" in arguments:
            import_module(f"lightning_decentral.cli.{module}").add(command)
            if name not in SILENT:
                command.add_argument("--json", action="store_true", help="answer with JSON (docs/commands.md)")
    choices: dict[str, argparse.ArgumentParser] = commands.choices
    return choices


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=["bash"])
    parser.set_defaults(run=lambda options: print(script(options.commands), end=""))


def script(commands: Mapping[str, argparse.ArgumentParser]) -> str:
    """Make the completion script for bash; if nothing matches, it completes files."""
    cases = [f'    *:{name}) known="{" ".join(options_of(parser))}" ;;' for name, parser in commands.items()]
    return BASH.format(commands=" ".join(commands), cases="\n".join(cases))


def options_of(parser: argparse.ArgumentParser) -> Sequence[str]:
    """Completions of a command: its options and the choices of its arguments."""
    actions = parser._actions  # argparse lists them nowhere else
    words = (word for action in actions for word in action.option_strings or map(str, action.choices or ()))
    return [word for word in words if word.startswith("--") or not word.startswith("-")]
