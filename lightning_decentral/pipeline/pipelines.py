"""Several pipelines: what the workers of one stage do together, and the mean of what drifts apart."""

from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_decentral.mean import Swap, floating, mean
from lightning_decentral.pipeline.workers import PipelineWorkers
from lightning_decentral.replicas import AllReduce, Bond, Replicas


class Pipelines(PipelineWorkers):
    """The part of `TokenPipelineStrategy` that keeps equal stages together.

    Args:
        replicas: what they do together.
    """

    def __init__(self, *, replicas: Replicas | None, **workers: Any) -> None:
        super().__init__(**workers)
        self.replicas = replicas or AllReduce()
        self._bond = Bond()
        self._swap: Swap | None = None
        self._apart = False

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

    def _mean(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        assert self._replicas is not None
        return mean(tensors, self._replicas, self._bond.share())

    def _swap_in(self) -> None:
        if self._apart:
            tensors = floating([self._module])
            self._swap = Swap(tensors, self._mean(tensors))

    def _swap_out(self) -> None:
        if self._swap is not None:
            self._swap.undo()
            self._swap = None

    on_validation_start = on_test_start = on_predict_start = _swap_in
    on_validation_end = on_test_end = on_predict_end = _swap_out

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This worker's own stage, also while the mean stands in its place."""
        state: dict[str, Any] = super().lightning_module_state_dict()
        return state if self._swap is None else self._swap.paused(state)

    def on_train_end(self) -> None:
        """Training ends with all pipelines at the mean."""
        super().on_train_end()
        if self._apart:
            self._bond.settle()
            tensors = floating([self._module])
            Swap(tensors, self._mean(tensors))
            self._apart = False
