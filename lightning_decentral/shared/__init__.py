"""What the methods share: the strategy base, checkpoints, the mean model, registration, loggers; and lazy exports.

Below: `plan` (timeline, forecasts), `compute` (buckets, devices), `wire` (transport, agreement, averages). Public: all
names below. `lazy_exports` makes the faces of all folders.
"""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_decentral.shared.loggers import Rows as Rows
    from lightning_decentral.shared.loggers import WandbPerWorker as WandbPerWorker


def lazy_exports(package: str) -> tuple[Callable[[str], Any], list[str]]:
    """(`__getattr__`, `__all__`) of a package (PEP 562), whose face imports as `from MODULE import NAME as NAME`."""
    # The face's own imports for type checkers are the list, and only what is asked for is loaded: `from
    # lightning_decentral.gossip import GossipStrategy` reads no report, no simulation and no other rules.
    tree = ast.parse(Path(str(sys.modules[package].__file__)).read_text(encoding="utf-8"))
    blocks = [node.body for node in tree.body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: str(node.module) for node in imports for alias in node.names}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)  # asked for once
        return value

    return load, sorted(homes)


__getattr__, __all__ = lazy_exports(__name__)
