"""Optional packages (extras): the modules themselves and model configurations of `transformers`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any


def extra(module: str) -> ModuleType:
    """The imported module, or MissingExtra with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # Here, since it asks for Hydra, which the models themselves don't.
        from lightning_decentral.shared.errors import MissingExtra

        remedy = "pip install 'lightning-decentral[recipes]'"
        raise MissingExtra(f"{module} is needed here and {error.name} is not installed: {remedy}") from error


def configured(kind: str, options: Mapping[str, Any]) -> Any:
    """The configuration `transformers.<kind>(**options)`.

    A misspelt option would be stored there without a word, so unknown ones raise ValueError with the known ones.
    """
    configuration = getattr(extra("transformers"), kind)
    known = set(configuration().to_dict()) | {"num_labels"}
    unknown = sorted(set(options) - known)
    if unknown:
        raise ValueError(f"{kind} has no option {', '.join(unknown)}: it has {', '.join(sorted(known))}")
    try:
        made = configuration(**options)
    except Exception as error:  # its classes of errors have changed from release to release
        raise ValueError(f"{kind} refuses its options: {' '.join(str(error).split())}") from None
    return made
