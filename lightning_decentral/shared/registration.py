"""Registration of the strategies' names, and refusals of options and modules that they can't serve."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import nn


def refuse_unknown(strategy: type[DDPStrategy], options: Iterable[str]) -> None:
    """ValueError for an option that neither the strategy nor DDPStrategy itself has: nothing would read it."""
    # Without a wrapper nothing would read `ddp_comm_hook` and its like.
    taken = {name for name in inspect.signature(DDPStrategy.__init__).parameters if not name.startswith("ddp_")}
    unknown = sorted(set(options) - taken)
    if unknown:
        own = {name for name in inspect.signature(strategy.__init__).parameters if name != "ddp"}
        valid = ", ".join(sorted((own | taken) - {"self", "kwargs", "model_averaging_period"}))
        raise ValueError(
            f"{strategy.__name__} has no option {unknown[0]!r} (there is no DDP wrapper to take it): it has {valid}"
        )


def refuse_sync_batch_norm(strategy: type[DDPStrategy], module: nn.Module, asked: bool) -> None:
    """ValueError where BatchNorm would gather its statistics over the workers, which would wait for each other."""
    if asked or any(isinstance(m, nn.SyncBatchNorm) for m in module.modules()):
        raise ValueError(
            "SyncBatchNorm makes all workers wait for each other in every layer, "
            f"which {strategy.__name__} exists to avoid: use plain BatchNorm "
            "(its statistics are averaged for the mean model), GroupNorm or LayerNorm"
        )


START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}


def register(registry: Any, name: str, strategy: Callable[..., Strategy], what: str) -> None:
    """`name`, `name_spawn`, `name_fork` and `name_notebook`; a second call changes nothing."""
    for ending, start_method in START_METHODS.items():
        description = f"{what}, processes by {start_method}"
        registry.register(
            f"{name}{ending}", strategy, description=description, override=True, start_method=start_method
        )


def refuse(registry: Any, name: str) -> None:
    """The same names in the registry of `pytorch_lightning`, whose Trainer they don't work with: ValueError."""

    def refused(**_: object) -> None:
        raise ValueError(
            "lightning_decentral works with the `lightning` package, this Trainer is of `pytorch_lightning`: "
            "write `from lightning.pytorch import Trainer` instead of `from pytorch_lightning import Trainer`"
        )

    for ending in START_METHODS:
        registry.register(f"{name}{ending}", refused, description="needs the lightning package", override=True)
