"""Names of strategies in the registries of `lightning` and of `pytorch_lightning`, whichever is imported, and when.

Neither is imported for the sake of its registry: a name is entered when the user's own import has made that.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
WRAPPED = ("", "_find_unused_parameters_false", "_find_unused_parameters_true")
"""Endings that ddp's names have. They choose something of its wrapper: without one all mean the same."""

Then = Callable[[ModuleType], None]


def register(registry: Any, name: str, strategy: Callable[..., Any], what: str) -> None:
    """`name`, `name_spawn`, `name_fork`, `name_notebook`, and each as ddp's longer names have it; a second call
    changes nothing."""
    for ending, start_method in START_METHODS.items():
        description = f"{what}, processes by {start_method}"
        for choice in WRAPPED:
            registry.register(
                f"{name}{ending}{choice}", strategy, description=description, override=True, start_method=start_method
            )


def when_imported(modules: dict[str, Then]) -> None:
    """then(module) for each of these: now where it is imported, otherwise right after it will be."""
    for name in modules.keys() & sys.modules.keys():
        modules[name](sys.modules[name])
    for finder in [f for f in sys.meta_path if isinstance(f, AfterImport)]:
        sys.meta_path.remove(finder)
    sys.meta_path.insert(0, AfterImport(modules))


class AfterImport(MetaPathFinder):
    """Leaves finding to the others, and calls `then` where a module of that name has run."""

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
