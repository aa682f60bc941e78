"""Which worker is which stage of which pipeline, and what it's connected to."""

from datetime import timedelta
from typing import Any

from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy

from lightning_decentral.agreement import check_same_model, start_from_worker_0
from lightning_decentral.transport import Transport, Wire, connect, connected


class PipelineWorkers(DDPStrategy):
    """Worker w is stage w % P of pipeline w // P, without a wrapper module.

    Args:
        stages: P; None: all workers.
    """

    def __init__(self, *, stages: int | None, timeout: timedelta | None = default_pg_timeout, **ddp: Any) -> None:
        super().__init__(timeout=timeout, **ddp)
        if stages is not None and stages < 1:
            raise ValueError(f"stages must be at least 1, got {stages}")
        self.stages = stages
        self._wire: Wire | None = None
        self._over: Transport | None = None
        self._back: Transport | None = None
        self._replicas: Transport | None = None

    @property
    def num_stages(self) -> int:
        """P."""
        return self.stages or self.num_nodes * self.num_processes

    @property
    def num_pipelines(self) -> int:
        """Replicas of the pipeline."""
        return self.num_nodes * self.num_processes // self.num_stages

    @property
    def pipeline(self) -> int:
        """Which pipeline this worker belongs to."""
        return self.global_rank // self.num_stages

    @property
    def stage(self) -> int:
        """Which stage of it this worker is."""
        return self.global_rank % self.num_stages

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """All stages of a pipeline read the same batches."""
        return {"num_replicas": self.num_pipelines, "rank": self.pipeline}

    def setup_environment(self) -> None:
        """Check the numbers, then connect."""
        self._check_workers()
        super().setup_environment()

    def _check_workers(self) -> None:
        workers = self.num_nodes * self.num_processes
        if workers % self.num_stages:
            raise ValueError(
                f"{workers} workers are no multiple of stages={self.stages}: use devices x num_nodes = "
                f"{self.num_stages} x pipelines, or leave stages out"
            )

    def configure_ddp(self) -> None:
        """No wrapper."""

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def _connect(self, module: LightningModule) -> None:
        if not connected():
            return
        if self._wire is None:
            self._wire = connect(self.root_device, self._timeout)
            stages, workers = self.num_stages, range(self.world_size)
            for first in workers[::stages]:
                group = workers[first : first + stages]
                self._over, self._back = (self._wire.group(group) or own for own in (self._over, self._back))
            self._replicas = self._stage_group()
        check_same_model(module, self._wire.roll)
        built = [t for t in (*module.parameters(), *module.buffers()) if not t.is_meta]  # the others are drawn alike
        start_from_worker_0(built, self._wire.flags)

    def _stage_group(self) -> Transport:
        """A new group of the workers that are this stage. Collective."""
        assert self._wire is not None
        groups = [self._wire.group(range(self.world_size)[s :: self.num_stages]) for s in range(self.num_stages)]
        return next(own for own in groups if own is not None)

    @property
    def alone(self) -> bool:
        """An exception has taken this worker off the others' path: nothing collective may be called any more."""
        trainer = self._module._trainer if self.lightning_module is not None else None
        return trainer is not None and trainer.interrupted

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all workers."""
        if not self.alone:
            super().barrier(*args, **kwargs)
