"""Several pipelines: what the workers of one stage do together, and the mean of what drifts apart."""

from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_decentral.mean import mean
from lightning_decentral.mean_model import MeanModel
from lightning_decentral.pipeline.workers import PipelineWorkers
from lightning_decentral.replicas import AllReduce, Bond, Replicas


class Pipelines(MeanModel, PipelineWorkers):
    """The part of `TokenPipelineStrategy` that keeps equal stages together.

    Args:
        replicas: what they do together.
    """

    def __init__(self, *, replicas: Replicas | None, **workers: Any) -> None:
        super().__init__(**workers)
        self.replicas = replicas or AllReduce()
        self._bond = Bond()

    def _check_workers(self) -> None:
        super()._check_workers()
        if self.num_pipelines > 1:
            self.replicas.check(self.num_pipelines, self._pipelines_per_node)

    @property
    def _pipelines_per_node(self) -> int:
        """1 where a pipeline has several nodes."""
        return max(1, self.num_processes // self.num_stages)

    @property
    def _drifting(self) -> bool:
        return self.num_pipelines > 1 and self.replicas.drifts

    def _join(self) -> None:
        """Once the optimizers exist. Collective."""
        if self._wire is not None and self.num_pipelines > 1:
            self._bond = self.replicas.join(self._stage_group, self.root_device, self._pipelines_per_node)
            self._bond.prepare(self.optimizers)

    def _part_ways(self) -> None:
        self._bond.release()
        self._bond, self._swap, self._apart = Bond(), None, False

    # ---- steps --------------------------------------------------------------------------------------------------

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """The user's update, then what the replicas do."""
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self._apart = self._drifting
        self._bond.updated(optimizer)
        return output

    # ---- the mean of the pipelines --------------------------------------------------------------------------------

    def mean_of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The exact mean over the replicas of this stage, by their shares; all must call it."""
        assert self._replicas is not None
        return mean(tensors, self._replicas, self._bond.share())

    def settle(self) -> None:
        """Land what is in flight."""
        self._bond.settle()
