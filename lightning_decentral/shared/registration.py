"""The options that strategies have from DDPStrategy, for which Trainers they are, refusals of what they can't serve."""

import inspect
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import CheckpointIO, Precision
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import nn

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


OTHER = {
    "lightning.pytorch.strategies.strategy": ("pytorch_lightning", "lightning_decentral.pytorch_lightning"),
    "pytorch_lightning.strategies.strategy": ("lightning.pytorch", "lightning_decentral"),
}
"""{where Strategy is from: (the other package, where its strategies are)}"""

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


class UnwrappedStrategy(DDPStrategy):
    """DDPStrategy without its wrapper: the processes and groups of `ddp`, and the user's own module in them.

    Named one by one: LightningCLI reads constructors, and gives every option that it finds there.

    Args:
        accelerator, parallel_devices, checkpoint_io, precision_plugin: the Trainer's own arguments give these.
        cluster_environment: who started the processes.
        process_group_backend: nccl, gloo, ...; by default the device's.
        timeout: after which a collective call has failed.
        start_method: how the processes of a host are started.

    Raises:
        ValueError: for any other option; of DDP's own wrapper too, there is none to read it.
    """

    def __init__(
        self,
        *,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: StartMethod = "popen",
        **unknown: Any,
    ) -> None:
        refuse_unknown(type(self), unknown)
        super().__init__(
            accelerator,
            parallel_devices,
            cluster_environment,
            checkpoint_io,
            precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )

    def __repr__(self) -> str:
        return named(self)

    def configure_ddp(self) -> None:
        """No wrapper."""

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """The package registers its names itself; DDP's would name this class `ddp`."""


def named(strategy: Strategy) -> str:
    """Of which package's Trainer it is. A Trainer of another refuses it, and says what it got."""
    package, other = Strategy.__module__.removesuffix(".strategies.strategy"), OTHER[Strategy.__module__]
    name = type(strategy).__name__
    return f"<{name} for {package}.Trainer; {other[0]}.Trainer takes {other[1]}.{name}>"


def refuse_unknown(strategy: type, options: Iterable[str]) -> None:
    """ValueError for an option that neither the strategy nor a base below DDPStrategy names: nothing would read it."""
    unknown = sorted(options)
    if unknown:
        constructors = [vars(cls)["__init__"] for cls in _above_ddp(strategy) if "__init__" in vars(cls)]
        named = [p for made in constructors for p in inspect.signature(made).parameters.values() if p.kind in NAMED]
        valid = ", ".join(sorted({p.name for p in named} - {"self"}))
        raise ValueError(
            f"{strategy.__name__} has no option {unknown[0]!r} (there is no DDP wrapper to take it): it has {valid}"
        )


def _above_ddp(strategy: type) -> tuple[type, ...]:
    mro = strategy.__mro__
    return mro[: [cls.__name__ for cls in mro].index("DDPStrategy")]  # Trainers' or Fabric's


def refuse_sync_batch_norm(strategy: type, module: nn.Module, asked: bool) -> None:
    """ValueError where BatchNorm would gather its statistics over the workers, which would wait for each other."""
    if asked or any(isinstance(m, nn.SyncBatchNorm) for m in module.modules()):
        raise ValueError(
            "SyncBatchNorm makes all workers wait for each other in every layer, "
            f"which {strategy.__name__} exists to avoid: use plain BatchNorm "
            "(its statistics are averaged for the mean model), GroupNorm or LayerNorm"
        )
