"""The console's help reads neither torch nor Lightning nor Hydra; a command reads its own module alone."""

import subprocess
import sys

from lightning_decentral.cli.main import COMMANDS

HELP = """
import sys
from lightning_decentral.recipes import command
try:
    command.main(sys.argv[1:])
except SystemExit:
    pass
print(*sorted(sys.modules))
"""


def read_by(*words: str) -> list[str]:
    asked = [sys.executable, "-c", HELP, *words]
    return (
        subprocess.run(asked, capture_output=True, text=True, timeout=100, check=True).stdout.splitlines()[-1].split()
    )


def test_help_reads_no_more_than_the_options() -> None:
    modules = read_by("--help")
    assert not {"torch", "lightning", "hydra", "matplotlib", "scipy"} & set(modules)
    own = [name for name in modules if name.startswith("lightning_decentral.")]
    assert own == [
        "lightning_decentral.cli",
        "lightning_decentral.cli.console",
        "lightning_decentral.cli.main",
        "lightning_decentral.recipes",
        "lightning_decentral.recipes.command",
        "lightning_decentral.shared",
        "lightning_decentral.shared.application",
        "lightning_decentral.shared.plan",
        "lightning_decentral.shared.plan.figure",
        "lightning_decentral.shared.registry",
    ]


def test_a_command_reads_no_others() -> None:
    name = "topology"
    modules = set(read_by(name, "--help"))
    assert f"lightning_decentral.cli.{COMMANDS[name][0]}" in modules
    others = {module for module, _ in COMMANDS.values()} - {name, "main"}
    assert not {f"lightning_decentral.cli.{module}" for module in others} & modules
