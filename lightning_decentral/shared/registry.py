"""Registers the strategies' names in `lightning` and in `pytorch_lightning`, once the user imports that package.

Neither package is imported for the sake of its registry, nor is jsonargparse, the parser of LightningCLI. jsonargparse
finds classes by their own names alone: `spell` adds the names of Hydra's files."""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
WRAPPED = ("", "_find_unused_parameters_false", "_find_unused_parameters_true")
"""Endings of ddp's registered names, which choose options of DDP's wrapper. Without a wrapper all mean the same."""

Then = Callable[[ModuleType], None]


def register(registry: Any, name: str, strategy: Callable[..., Any], what: str) -> None:
    """Register `name`, `name_spawn`, `name_fork`, `name_notebook`, and each with the endings of ddp's longer names.
    A second call changes nothing."""
    for ending, start_method in START_METHODS.items():
        description = f"{what}, processes by {start_method}"
        for choice in WRAPPED:
            registry.register(
                f"{name}{ending}{choice}", strategy, description=description, override=True, start_method=start_method
            )


def hint(names: Sequence[str], served: Sequence[str], connectors: ModuleType) -> None:
    """Make the error for a misspelt strategy suggest the nearest of `names` and list those in `served`, in one line.
    Trainer's and Fabric's own errors show none of this package's names."""
    connector = getattr(connectors, "_AcceleratorConnector", None) or getattr(connectors, "_Connector", None)
    check = getattr(connector, "_check_config_and_set_final_flags", None)
    if check is None or hasattr(check, "__wrapped__"):
        return

    @functools.wraps(check)
    def checked(self: Any, strategy: Any, *others: Any, **options: Any) -> None:
        try:
            check(self, strategy, *others, **options)
        except ValueError:
            known = self._registered_strategies
            name = strategy.lower() if isinstance(strategy, str) else "auto"
            nearest = get_close_matches(name.replace("-", "_"), known, 1)
            if name == "auto" or name in known or not nearest or not nearest[0].startswith(tuple(names)):
                raise
            raise ValueError(
                f"strategy={strategy!r} is not a strategy: did you mean {nearest[0]!r}? Example choices: "
                f"{', '.join(served)}, and Lightning's own: auto, ddp, fsdp, ..."
            ) from None

    connector._check_config_and_set_final_flags = checked  # type: ignore[union-attr]


def spell(
    strategies: Mapping[str, Callable[[str], str]],  # {name: (module of the annotated base class) -> strategy's path}
    typehints: ModuleType,  # jsonargparse's, which finds a class by its name
) -> None:
    """Let jsonargparse take names of Hydra's files: `--trainer.strategy=gossip --trainer.strategy.topology=ring`."""
    find = getattr(typehints, "resolve_class_path_by_name", None)
    if find is None or hasattr(find, "__wrapped__"):
        return

    @functools.wraps(find)
    def found(cls: Any, name: str) -> Any:
        path = find(cls, name)
        if "." in path or not isinstance(cls, type):
            return path
        if cls.__name__ == "Strategy" and name in strategies:
            return strategies[name](cls.__module__)
        from lightning_decentral.shared.plan.kinds import class_path

        return class_path(cls, name) or path

    typehints.resolve_class_path_by_name = found  # type: ignore[attr-defined]


def when_imported(modules: dict[str, Then]) -> None:
    """Call then(module) for each of these modules: now if the module is imported, otherwise right after its import."""
    for name in modules.keys() & sys.modules.keys():
        modules[name](sys.modules[name])
    for finder in [f for f in sys.meta_path if isinstance(f, AfterImport)]:
        sys.meta_path.remove(finder)
    sys.meta_path.insert(0, AfterImport(modules))


class AfterImport(MetaPathFinder):
    """Import hook that lets the other finders find a module, and calls `then` once the module has run."""

    def __init__(self, modules: dict[str, Then]) -> None:
        self._modules = modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._modules:
            return None
        finders = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in finders)), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            run, then = loader.exec_module, self._modules[fullname]

            def exec_module(module: ModuleType) -> None:
                run(module)
                then(module)

            loader.exec_module = exec_module
        return spec
