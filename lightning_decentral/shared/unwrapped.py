"""DDPStrategy without its wrapper: what it still has options for, and which names it isn't registered by."""

from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import CheckpointIO, Precision
from lightning.pytorch.strategies import DDPStrategy

from lightning_decentral.shared.registration import refuse_unknown

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


class UnwrappedStrategy(DDPStrategy):
    """The processes and groups of `ddp`, and the user's own module in them.

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

    def configure_ddp(self) -> None:
        """No wrapper."""

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """The package registers its names itself; DDP's would name this class `ddp`."""
