"""`lightning-decentral completion bash`: a script by which a shell completes commands and options.

Short, and by itself: every parser is read here, and no command needs it.

    source <(lightning-decentral completion bash)

It is made of the parser itself, so a new command or option is completed by existing.
"""

import argparse
from collections.abc import Mapping, Sequence

BASH = """\
_lightning_decentral() {{
  local words current=${{COMP_WORDS[COMP_CWORD]}}
  case "$COMP_CWORD:${{COMP_WORDS[1]}}" in
    1:*) words="{commands}" ;;
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _lightning_decentral lightning-decentral
"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=["bash"])
    parser.set_defaults(run=lambda options: print(script(options.commands), end=""))


def script(commands: Mapping[str, argparse.ArgumentParser]) -> str:
    """Completion script for bash; where nothing matches, files are completed as ever."""
    cases = [f'    *:{name}) words="{" ".join(options_of(parser))}" ;;' for name, parser in commands.items()]
    return BASH.format(commands=" ".join(commands), cases="\n".join(cases))


def options_of(parser: argparse.ArgumentParser) -> Sequence[str]:
    """Completions of a command: its options and the choices of its arguments."""
    words: list[str] = []
    for action in parser._actions:  # argparse lists them nowhere else
        chosen = [] if action.option_strings else [str(choice) for choice in action.choices or ()]
        words += [*(option for option in action.option_strings if option.startswith("--")), *chosen]
    return words
