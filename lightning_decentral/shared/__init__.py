"""Code that all training methods use: base strategy, checkpoints, mean model, set-up checks, loggers, lazy exports.

A wrong error at set-up: constructors check the kinds of options (`plan.arguments`, `plan.kinds`). From then on
`setup_and_step` has the order (`WorkersStrategy.setup_distributed`, `setup`): `wire.meeting.comparison` (workers that
differ), `refusals` (every method), the `refusals` or `checks` of a method. `docs/how-it-works.md` has the table.

Subfolders: `plan` (timeline, forecasts), `compute` (buckets, devices), `wire` (transport, agreement, averages). Public:
all names below. `lazy_exports` reads from the `if TYPE_CHECKING:` block of an `__init__.py` where each name lives, and
imports a module when one of its names is first used: `from lightning_decentral.gossip import GossipStrategy` doesn't
import the report, the simulation and the rules. Type checkers and readers see ordinary imports."""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from lightning_decentral.gossip.report import Rows as Rows
    from lightning_decentral.shared.loggers import WandbPerWorker as WandbPerWorker
    from lightning_decentral.shared.plan.data_parallel import DataParallel as DataParallel
    from lightning_decentral.shared.plan.forecast import Cluster as Cluster
    from lightning_decentral.shared.plan.forecast import Setting as Setting
    from lightning_decentral.shared.plan.forecast import forecast as forecast
    from lightning_decentral.shared.plan.forecast import one_slow as one_slow
    from lightning_decentral.shared.plan.network import Network as Network
    from lightning_decentral.shared.plan.profile import BlockCost as BlockCost
    from lightning_decentral.shared.plan.profile import LinkCost as LinkCost
    from lightning_decentral.shared.plan.profile import Model as Model


def lazy_exports(package: str) -> tuple[Callable[[str], Any], list[str]]:
    """Return PEP 562's (`__getattr__`, `__all__`) of a package whose imports are `from MODULE import NAME as NAME`."""
    spec = sys.modules[package].__spec__
    assert spec is not None
    # From the loader: a mirrored package names the mirror's modules, which the file doesn't.
    tree = ast.parse(cast(SourceFileLoader, spec.loader).get_source(package) or "")
    blocks = [node.body for node in tree.body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: str(node.module) for node in imports for alias in node.names}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            module = import_module(homes[name])
        except ModuleNotFoundError as error:
            if str(error.name).partition(".")[0] != "lightning":
                raise
            top, _, inner = package.partition(".")
            mirrored = f"{top}.pytorch_lightning.{inner.partition('.')[0]}"
            raise ModuleNotFoundError(
                f"{name} needs the package lightning, which isn't installed: pip install lightning, "
                f"or for pytorch_lightning write `from {mirrored} import {name}`",
                name=error.name,
            ) from error
        value = getattr(module, name)
        setattr(sys.modules[package], name, value)  # found once, then kept in the module
        return value

    return load, sorted(homes)


MOVED = {
    "gossip.compute.combine.momentum": "gossip.compute.combine.gradient_tracking",
    "gossip.compute.combine.push_sum": "gossip.compute.combine.sums",
    "gossip.compute.combine.rate": "gossip.compute.combine.gossip",
    "gossip.compute.combine.relay_sum": "gossip.compute.combine.sums",
    "gossip.compute.combine.rule": "gossip.compute.combine.combine",
    "gossip.plan.topology.nodes": "gossip.plan.topology.combined",
    "gossip.plan.traffic": "gossip.plan.planned_traffic",
    "gossip.wire.island": "gossip.island",
    "partial.plan.depth_order": "partial.plan.depth",
    "pipeline.compute.activation_codec": "pipeline.wire.executor",
    "pipeline.stage_training": "pipeline.stage_gradients",
    "pipeline.training_step": "pipeline.users_step",
    "shared.checkpoint.replica": "shared.checkpoint.resuming_replicas",
    "shared.checkpoint.worker": "shared.checkpoint.checkpoints",
    "shared.compute.codec.difference": "shared.compute.codec.topk",
    "shared.compute.codec.packed": "shared.compute.codec.quantize",
    "shared.replica": "shared.replica_strategy",
    "shared.workers": "shared.setup_and_step",
}
"""{module of version 0.2.0: module that has its public classes now}, so that pickles of 0.2.0 load."""
PACKAGE = __name__.partition(".")[0]


class Moved(MetaPathFinder, Loader):
    """Import hook for merged modules: a module imported by its old name has the names of the new module."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname.removeprefix(f"{PACKAGE}.") in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        now = import_module(f"{PACKAGE}.{MOVED[module.__name__.removeprefix(f'{PACKAGE}.')]}")
        module.__dict__["__getattr__"] = lambda name: getattr(now, name)


sys.meta_path.append(Moved())
__getattr__, __all__ = lazy_exports(__name__)
