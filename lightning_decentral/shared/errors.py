"""Error messages of a command line: which exceptions the user can fix, and each as one line with its remedy."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from hydra.errors import HydraException, InstantiationException, MissingConfigException
from hydra.utils import get_object
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from lightning_decentral.shared.plan.arguments import constructor_of


class MissingExtra(ImportError):
    """An optional package is not installed; the message names the extra that brings it."""


# Errors a user can mend; any other is a fault of the program and keeps its traceback.
MENDABLE = (HydraException, OmegaConfBaseException, MisconfigurationException, MissingExtra, ValueError, OSError)

# {configuration that another package brings: extra that installs the package}
FROM_EXTRAS: dict[str | None, str] = {"hydra/launcher/submitit_slurm": "slurm"}


def mendable(error: BaseException) -> bool:
    """Return whether the user can fix the error; an error that Hydra wrapped counts as the original error."""
    original = unwrapped(error)
    # Hydra wraps errors of constructors that a configuration names: there these two are the user's errors.
    return isinstance(original, MENDABLE) or (original is not error and isinstance(original, (TypeError, ImportError)))


def one_line(error: BaseException) -> str:
    """Return the error's message without line breaks; for an unknown name, with the known names."""
    for cause in chain_of_causes(error):
        if isinstance(cause, MissingConfigException) and cause.missing_cfg_file in FROM_EXTRAS:
            extra = FROM_EXTRAS[cause.missing_cfg_file]
            return f"{cause.missing_cfg_file} is missing: run pip install 'lightning-decentral[{extra}]'"
        if isinstance(cause, MissingConfigException) and cause.options:
            return f"{_flat(str(cause).splitlines()[0])}: choose one of {', '.join(cause.options)}"
        if isinstance(cause, (ConfigAttributeError, ConfigKeyError)):
            return _unknown_key(cause)
        if isinstance(cause, TypeError) and isinstance(error, InstantiationException):
            line = _flat(str(error))  # a constructor's error, with the names that it takes
            names = _parameters(line.partition("'")[2].partition("'")[0]) if "argument" in line else []
            return f"{line}; it takes {', '.join(names)}" if names else line
        if isinstance(cause, MissingMandatoryValue):
            return f"{cause.full_key} must be given: add {cause.full_key}=... to the command"
    original = unwrapped(error)
    return _flat(str(original)) or type(original).__name__


def unwrapped(error: BaseException) -> BaseException:
    """Return the original error below those that Hydra wraps around errors of constructors."""
    return next((cause for cause in chain_of_causes(error) if not isinstance(cause, InstantiationException)), error)


def chain_of_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, then the cause that it was raised from, and so on."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__


def refuse_unowned(group: str, node: DictConfig) -> None:
    """Raise ValueError for an option that the node's target doesn't take; a partial would find out only when called."""
    target = str(node.get("_target_"))
    names = _parameters(target)
    unknown = [str(key) for key in node if not str(key).startswith("_") and key not in names]
    if unknown and names:
        raise ValueError(f"no '{unknown[0]}' in {group}: {target} takes {', '.join(names[1:])}")


def refuse_missing(cfg: DictConfig) -> None:
    """Raise ValueError for values that must be given, with the override that gives each."""
    # Checked before all work: an error in instantiating names the place of a node that is passed to another node.
    if missing := list(_missing(cfg)):
        overrides = " ".join(f"{key}=..." for key in missing)
        raise ValueError(f"{' and '.join(missing)} must be given: add {overrides} to the command")


def _missing(node: Any, place: str = "") -> Iterator[str]:
    for key in node:
        where = f"{place}.{key}" if place else str(key)
        if OmegaConf.is_missing(node, key):
            yield where
        # A node behind an interpolation is checked where it is defined.
        elif not OmegaConf.is_interpolation(node, key) and isinstance(node[key], DictConfig):
            yield from _missing(node[key], where)


def refuse_mistyped(node: Any, place: str = "") -> None:
    """Raise ValueError, before all work, for a value in the node whose type its target's annotations don't allow.
    Interpolations and None are checked by the targets themselves."""
    target, constructor = node.get("_target_"), None
    with suppress(ImportError, ValueError, TypeError):  # not found or not readable: instantiating raises
        if target and (made := get_object(str(target))):
            constructor = constructor_of(made, made.__init__ if inspect.isclass(made) else made)
    for key in node:
        if OmegaConf.is_missing(node, key) or OmegaConf.is_interpolation(node, key) or node[key] is None:
            continue
        value, where = node[key], f"{place}.{key}" if place else str(key)
        nodes = isinstance(value, ListConfig) and any(isinstance(item, DictConfig) for item in value)
        if isinstance(value, DictConfig):
            refuse_mistyped(value, where)
        elif constructor is not None and not nodes:
            constructor.one(str(key), value, where)


def _unknown_key(error: OmegaConfBaseException) -> str:
    """Return the message for an unknown key x of a node: no 'x' in node: it has a, b; add others as +c, +d."""
    node: Any = error.parent_node
    if not isinstance(node, DictConfig):
        return _flat(str(error))
    keys = [str(key) for key in node if not str(key).startswith("_")]
    place = str(error.full_key or "").rpartition(".")[0]
    known = f"no '{error.key}' in {place or 'the configuration'}: it has {', '.join(keys) or 'no keys'}"
    more = [f"+{place}.{name}" for name in _parameters(node.get("_target_")) if name not in keys]
    return f"{known}; add others as {', '.join(more)}" if more else known


def _parameters(target: str | None) -> list[str]:
    """Return the argument names of the class or function at this dotted path; none where nothing is found."""
    try:
        parameters = inspect.signature(get_object(target)).parameters.values() if target else ()
    except (ImportError, ValueError, TypeError):
        return []
    return [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]


def _flat(text: str) -> str:
    return " ".join(text.split())
