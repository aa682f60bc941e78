"""Every command in the pages names things that exist: make targets, scripts, extras, Hydra overrides that compose."""

import argparse
import importlib.util
import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser

from lightning_decentral.cli import gang_schedule, lobby, rehearsing, schedule
from lightning_decentral.cli import planning as plan
from lightning_decentral.cli.topology import topology_of
from lightning_decentral.shared.plan.forecast import Cluster
from tests.docs.pages import PAGES, ROOT, commands, name
from tests.packaging.project import PROJECT

COMMANDS = [pytest.param(words, id=f"{name(page)}: {' '.join(words)}") for page in PAGES for words in commands(page)]


def check(words: list[str]) -> None:
    """Raises or fails where the command names something that isn't there."""
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    program, arguments = Path(words[0]).name, words[1:]
    {
        "make": check_make,
        "pip": check_pip,
        "python": check_python,
        "lightning-decentral-train": check_overrides,
        "lightning-decentral": check_subcommand,
        "torchrun": check_torchrun,
        "cd": lambda arguments: None,
        "git": lambda arguments: None,
    }[program](arguments)


def check_make(arguments: list[str]) -> None:
    phony = re.search(r"^\.PHONY:(.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert phony
    targets = {word for word in arguments if "=" not in word}
    assert targets <= set(phony[1].split()), f"unknown make target in {targets}"


def check_pip(arguments: list[str]) -> None:
    named = re.findall(r"\[([\w,-]+)\]", " ".join(arguments))
    extras = {extra for group in named for extra in group.split(",")}
    assert extras <= set(PROJECT["optional-dependencies"]), f"unknown extra in {extras}"


def check_python(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        assert importlib.util.find_spec(arguments[1]), f"no module {arguments[1]}"
        return
    assert (ROOT / arguments[0]).is_file(), f"no file {arguments[0]}"
    if arguments[0] == "recipes/train.py":
        check_overrides(arguments[1:])


def check_torchrun(arguments: list[str]) -> None:
    """Its own options are `--name=value`; what it starts is a script, or a module behind `-m`."""
    check_python([word for word in arguments if not word.startswith("--")])


def check_lobby(arguments: list[str]) -> None:
    lobby.add(parser := argparse.ArgumentParser())
    parser.parse_args(arguments)


def check_subcommand(arguments: list[str]) -> None:
    """Of the subcommands that take words of the recipes, the words compose."""
    checks = {
        "cuts": lambda words: check_overrides(["strategy=partial_backprop", *recipe_words(words)]),
        "lobby": check_lobby,
        "placement": lambda words: check_overrides(["strategy=gossip", *recipe_words(words)]),
        "plan": check_plan,
        "profile": lambda words: check_overrides(recipe_words(words)),
        "rehearse": check_rehearse,
        "report": lambda words: None,
        "schedule": check_schedule,
        "topology": lambda words: topology_of(words[0], [word for word in words if "=" in word]),
    }
    assert arguments[0] in checks, f"unknown subcommand {arguments[0]}"
    checks[arguments[0]](arguments[1:])


def recipe_words(arguments: list[str]) -> list[str]:
    return [word for word in arguments if re.match(r"[\w/.@]+=", word)]


def check_plan(arguments: list[str]) -> None:
    """Options that exist, a cluster whose nodes are full."""
    parser = argparse.ArgumentParser()
    plan.add(parser)
    options = parser.parse_args(arguments)
    assert Cluster(options.workers, options.per_node or 1)


def check_rehearse(arguments: list[str]) -> None:
    """Options that exist; words and methods that compose."""
    parser = argparse.ArgumentParser()
    rehearsing.add(parser)
    options = parser.parse_args(arguments)
    words, workers = rehearsing.split(options.overrides)
    assert workers
    check_overrides(words)
    for method in options.method or ():
        check_overrides(method.split())


def check_schedule(arguments: list[str]) -> None:
    """Options, a policy and a layout that exist."""
    parser = argparse.ArgumentParser()
    schedule.add(parser)
    options = parser.parse_args(arguments)
    known = {**schedule.POLICIES, **gang_schedule.PLANS}
    assert {schedule.chosen("policy", name, known) for name in options.policy.split(",")}
    schedule.chosen("layout", options.layout, schedule.LAYOUTS)
    assert (options.jobs is None) != (options.trace is None)


def check_overrides(arguments: list[str]) -> None:
    """Of a sweep the first value is composed."""
    written = [argument for argument in arguments if argument not in ("-m", "--multirun")]
    parsed = OverridesParser.create().parse_overrides(written)
    lines = [(o.input_line or "", o.is_sweep_override()) for o in parsed]
    first = [line.split(",")[0] if sweep else line for line, sweep in lines]
    with initialize_config_module("lightning_decentral.conf", version_base="1.3"):
        compose("train", overrides=first)


@pytest.mark.parametrize("words", COMMANDS)
def test_command_names_what_exists(words: list[str]) -> None:
    check(words)


@pytest.mark.parametrize(
    "words",
    [
        ["make", "coffee"],
        ["pip", "install", "lightning-decentral[coffee]"],
        ["python", "recipes/coffee.py"],
        ["python", "recipes/train.py", "strategy=coffee"],
        ["lightning-decentral", "coffee"],
        ["lightning-decentral", "cuts", "recipe=coffee"],
        ["lightning-decentral", "topology", "coffee", "--workers", "4"],
        ["lightning-decentral", "schedule", "jobs.yaml", "--policy", "coffee"],
        ["coffee"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_is_found(words: list[str]) -> None:
    with pytest.raises(Exception, match="coffee"):
        check(words)


def test_the_first_screen_names_both_commands() -> None:
    screen = (ROOT / "README.md").read_text().splitlines()[:40]
    assert {"make demo", "make test"} <= {line.split("#")[0].strip() for line in screen}
