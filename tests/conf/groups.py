"""The YAML files and their nodes, read without Hydra."""

import inspect
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml
from hydra.utils import get_object

import lightning_decentral.conf

CONF = Path(str(lightning_decentral.conf.__file__)).parent
FILES = sorted(CONF.rglob("*.yaml"))
HYDRA_KEYS = {"_target_", "_partial_", "_convert_", "_recursive_", "_args_"}


def choices(group: str) -> set[str]:
    """File names of a group, without suffix."""
    return {file.stem for file in (CONF / group).glob("*.yaml")}


def nodes(tree: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every mapping with a `_target_`, and where it stands."""
    if isinstance(tree, dict):
        if "_target_" in tree:
            yield path, tree
        for key, value in tree.items():
            yield from nodes(value, f"{path}.{key}" if path else str(key))
    if isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from nodes(value, f"{path}[{index}]")


def parameters(target: Any) -> dict[str, inspect.Parameter]:
    """What a call takes by name; where it passes on **kwargs, also what the classes it inherits from take."""
    if target is timedelta:  # written in C, without a signature
        words = ("days", "seconds", "minutes", "hours")
        return {word: inspect.Parameter(word, inspect.Parameter.KEYWORD_ONLY, default=0) for word in words}
    found: dict[str, inspect.Parameter] = {}
    for owner in target.__mro__ if inspect.isclass(target) else (target,):
        call = vars(owner).get("__init__") if inspect.isclass(target) else owner
        if call is None:
            continue
        own = inspect.signature(call).parameters
        found = {**own, **found}
        if not any(p.kind is p.VAR_KEYWORD for p in own.values()):
            break
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: parameter for name, parameter in found.items() if parameter.kind in named and name != "self"}


def unowned(node: dict[str, Any]) -> set[str]:
    """Keys of the node that its target does not take."""
    return set(node) - HYDRA_KEYS - {"defaults"} - set(parameters(get_object(node["_target_"])))


def read(file: Path) -> Any:
    """The file as plain YAML."""
    return yaml.safe_load(file.read_text())
