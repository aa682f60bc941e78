"""The tests' own modules, callbacks and trainings, for `lightning` and, of the same files, `pytorch_lightning`."""

import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytorch_lightning as pl  # noqa: F401  # before processes are forked, which would each read it

from lightning_decentral.pipeline import Given
from lightning_decentral.pytorch_lightning.mirror import Renaming
from tests import ports, tiny
from tests.partial import towers
from tests.pipeline import training

HOMES = {"lightning.pytorch": "lightning_decentral", "pytorch_lightning": "lightning_decentral.pytorch_lightning"}
PACKAGES = tuple(HOMES)
SIZE = 3
ports.use("lightning_fabric")


def _mirrored(module: ModuleType) -> ModuleType:
    file, name = str(module.__file__), f"mirrored.{module.__name__}"
    spec = spec_from_file_location(name, file, loader=Renaming(name, file))
    assert spec is not None
    again = module_from_spec(spec)
    sys.modules[name] = again
    assert spec.loader is not None
    spec.loader.exec_module(again)
    return again


TOOLS = {module.__name__: (module, _mirrored(module)) for module in (tiny, towers, training)}


def tools(package: str, module: ModuleType) -> Any:
    """That module's classes, for Trainers of the package."""
    return TOOLS[module.__name__][PACKAGES.index(package)]


def gossiping(package: str, folder: Path, strategy: Any, steps: int, resume: Path | None = None, **options: Any) -> str:
    """Every worker's parameters after each step in `folder/rank.pt`, a checkpoint after four; what strategy it was."""
    lightning, mine = import_module(package), tools(package, tiny)
    lightning.seed_everything(1, workers=True, verbose=False)
    saving = lightning.callbacks.ModelCheckpoint(folder, filename="at-{step}", every_n_train_steps=4, save_top_k=-1)
    settings = {**tiny.QUIET, "enable_checkpointing": True, "devices": SIZE, "max_steps": steps, **options}
    trainer = lightning.Trainer(**settings, strategy=strategy, callbacks=[mine.Record(folder), saving])
    trainer.fit(mine.Net("adamw"), tiny.SizedBatches(6), ckpt_path=resume)
    return f"{type(trainer.strategy).__module__}.{type(trainer.strategy).__qualname__}"


def one_model(package: str, strategy: str) -> dict[str, Any]:
    """The trained state where all workers have one model, or have it in parts."""
    lightning = import_module(package)
    lightning.seed_everything(1, workers=True, verbose=False)
    tower = lambda: tools(package, towers).Tower(norm=True, optimizer="adamw")  # noqa: E731
    module = tools(package, training).Language() if strategy == "pipeline" else tower()
    batches = [] if strategy == "pipeline" else [towers.Batches(3)]
    how = {
        "pipeline": lambda: import_module(HOMES[package]).TokenPipelineStrategy(
            slicing=Given((5, 1, 4, 3)), start_method="fork"
        )
    }.get(strategy, lambda: strategy)()
    devices = 1 if strategy == "spilled" else 2
    lightning.Trainer(**tiny.QUIET, devices=devices, max_steps=3, strategy=how).fit(module, *batches)
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}
