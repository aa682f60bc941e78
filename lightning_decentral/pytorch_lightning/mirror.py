"""Modules that bind to `lightning`, read a second time to bind to `pytorch_lightning`: one text, two sets of classes.

    lightning_decentral.gossip.strategy          from lightning.pytorch import LightningModule
    lightning_decentral.pytorch_lightning
                       .gossip.strategy          from pytorch_lightning import LightningModule

Both packages have the same modules, but a Trainer of one takes no strategy of the other. Only names in import
statements change, so that lines, tracebacks and breakpoints are those of the file. Modules in `plan`, `compute` and
`wire` don't import Lightning: there is one of each, for both."""

import re
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec, spec_from_file_location
from types import CodeType, ModuleType

HERE = __name__.rpartition(".")[0]
PACKAGE = HERE.partition(".")[0]
METHODS = ("compressed", "elastic", "gossip", "partial", "pipeline", "shared", "spilled")
FLOORS = {"plan", "compute", "wire"}
PACKAGES = {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric"}
_IMPORT = re.compile(r"^(\s*(?:from|import)\s+)(lightning[\w.]*)", re.MULTILINE)


def use() -> None:
    """Let imports find what is mirrored from now on; a second call changes nothing."""
    if not any(isinstance(finder, Mirror) for finder in sys.meta_path):
        sys.meta_path.insert(0, Mirror())


def renamed(module: str) -> str:
    """Return what a mirrored module imports where the text has `module`.

    lightning.pytorch.callbacks -> pytorch_lightning.callbacks
    lightning_decentral.shared.setup_and_step -> lightning_decentral.pytorch_lightning.shared.setup_and_step"""
    for theirs, other in PACKAGES.items():
        if f"{module}.".startswith(f"{theirs}."):
            return other + module.removeprefix(theirs)
    inner = module.removeprefix(f"{PACKAGE}.")
    return f"{HERE}.{inner}" if inner != module and _binds(inner) else module


def _binds(inner: str) -> bool:
    folder, *below = inner.split(".")
    return folder in METHODS and not FLOORS & set(below)


class Mirror(MetaPathFinder):
    """Finds `lightning_decentral.pytorch_lightning.X` in the file of `lightning_decentral.X`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        inner = fullname.removeprefix(f"{HERE}.")
        if inner == fullname or not _binds(inner):
            return None
        read = find_spec(f"{PACKAGE}.{inner}")
        if read is None or read.origin is None:
            return None
        spec = spec_from_file_location(fullname, read.origin, loader=Renaming(fullname, read.origin))
        if spec is not None and read.submodule_search_locations is not None:
            spec.submodule_search_locations = []  # a package in whose folder no other finder looks
        return spec


class Renaming(SourceFileLoader):
    """Reads a file as if it imported from `pytorch_lightning`; the file's own compiled code is left as it is."""

    def get_source(self, fullname: str) -> str:
        return _IMPORT.sub(lambda found: found[1] + renamed(found[2]), super().get_source(fullname) or "")

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = compile(self.get_source(fullname), self.path, "exec", dont_inherit=True)
        return code
