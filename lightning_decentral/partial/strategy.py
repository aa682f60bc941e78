"""Strategy `Trainer(strategy="partial_backprop")`: data-parallel training in which the backward stops at a cut."""

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from lightning_decentral.partial.agreed import (
    described,
    found_together,
    introduced,
    options,
    refuse_unserved,
    remembered,
    run_of,
    timed,
    warm_up_state,
    wished,
)
from lightning_decentral.partial.compute.frozen_update import Absent
from lightning_decentral.partial.compute.search import Cuts, search
from lightning_decentral.partial.compute.uneven_batches import shared
from lightning_decentral.partial.plan.cost import Balance
from lightning_decentral.partial.plan.depth import DepthAssignment, Temporal
from lightning_decentral.partial.wire.depth_controller import CutSteps, DepthController
from lightning_decentral.partial.wire.reducer import Rank
from lightning_decentral.shared.meeting import TIMEOUT
from lightning_decentral.shared.plan.arguments import checked
from lightning_decentral.shared.replica_strategy import ReplicaStrategy
from lightning_decentral.shared.updates import GradientCheck, NonFinite, Unfollowed
from lightning_decentral.shared.wire.averaging.equal_replicas import EqualReplicas
from lightning_decentral.shared.wire.transport import Wire, of_all

KEY = "partial_backprop"


@checked
class PartialBackpropStrategy(ReplicaStrategy):
    """Data-parallel training in which each worker's backward stops at a cut, so only the layers above it are trained.

    grad of segment s = mean over exactly the workers that train s. The network is cut into segments; at each step a
    worker trains the top `depth` of them. Below, the forward runs without a graph, which saves backward, activations
    and traffic. All replicas make the same update and stay bit-equal. Cuts are found and verified on a copy.

    Args:
        depth: how many of the top segments each worker trains at each step.
        cuts: "auto", up to three cuts along the chain of blocks found; a number of cuts; "blocks", before each block
            and after the last; or names of modules to cut before.
        balance: the quantity that the segments of automatic cuts share equally.
        absent: what the optimizer does to parameters that no worker trained at a step.
        bucket_bytes: maximum size of gradients sent together; by default an eighth of the model, 2 to 256 MiB.
        nonfinite: what a step with NaN or infinity in its gradients does: "stop" training, or "skip" the update on all
            workers alike. In half precision the loss scaler skips.
        timeout: how long a worker waits for another worker before it ends.
        **ddp: options of Lightning's DDPStrategy (start_method, process_group_backend, ...).

    Raises:
        ValueError: here for an unknown option or impossible cuts; at set-up for SyncBatchNorm, manual optimization, an
            overridden backward; at the first batch, on every worker, for cuts that fail the verification.

    Source: structured partial backpropagation in the sense of Kumar et al. 2111.10672.
    """

    drifts: ClassVar[bool] = False  # replicas are equal after every step

    def __init__(
        self,
        *,
        depth: DepthAssignment | None = None,
        cuts: Cuts = "auto",
        balance: Balance | None = None,
        absent: Absent | None = None,
        bucket_bytes: int | None = None,
        nonfinite: NonFinite = "stop",
        timeout: timedelta = TIMEOUT,
        **ddp: Any,
    ) -> None:
        super().__init__(timeout=timeout, **ddp)
        self.depth, self.cuts, self.balance, self.absent, self.bucket_bytes = options(
            depth or Temporal(), cuts, balance, absent, bucket_bytes
        )
        self.member = self._steps = CutSteps(self.absent, partial(attrgetter("coordination.waiting"), self._group))
        self.nonfinite, self.gradient_check = nonfinite, GradientCheck(nonfinite, self._steps.settle)
        self._equal = EqualReplicas()
        self.followed = Unfollowed(self._equal.replaced)
        self._saved: dict[str, Any] | None = None
        self._samples: tuple[int, ...] = ()

    @property
    def driver(self) -> DepthController | None:
        """Controller of the cuts in use, from the first batch on."""
        return self._steps.driver

    # ---- set-up -----------------------------------------------------------------------------------------------------

    def refuse(self, module: nn.Module, fitting: bool) -> None:
        if self._layer_sync is not None or any(isinstance(m, nn.SyncBatchNorm) for m in module.modules()):
            raise ValueError(
                "SyncBatchNorm gathers over all workers in every layer's backward, but a backward may stop above the "
                "layer: use plain BatchNorm (with worker 0's running statistics), GroupNorm or LayerNorm"
            )
        super().refuse(module, fitting)

    def prepare(self, wire: Wire | None) -> None:
        """Prepare the update; the cuts are found at the first batch."""
        refuse_unserved(self._module)
        self._equal.begin(
            self._module, None if wire is None else of_all(wire.group), self._group.layouts, lambda: self.optimizers
        )

    def _find_cuts(self, *batch: Any, **kwargs: Any) -> DepthController:
        run, wish = run_of(self._module.trainer, *batch, **kwargs), wished(self.cuts, self._saved)
        plan = found_together(self.gather, lambda decide: search(self._module, wish, self.balance, run, decide))
        depth = timed(self.depth, self._module.trainer, self._saved or {})
        samples = self._samples or (1,) * self.world_size  # each worker's samples of a global batch
        place = Rank(self.global_rank, tuple(n / sum(samples) for n in samples))
        driver = DepthController(self._module, plan, depth, place)
        self._steps.drive(driver, self.wire, self._equal, self.bucket_bytes)
        self._saved = None
        rank_zero_info(described(driver, type(self._module).__name__))
        return driver

    def process_dataloader(self, dataloader: object) -> object:
        shares = [self.depth.share(rank, self.world_size) for rank in range(self.world_size)]
        if not self._module.trainer.training or len(set(shares)) == 1:
            return dataloader
        loader, self._samples = shared(dataloader, shares)
        return loader

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.lightning_module
        driver = self._steps.driver or self._find_cuts(*args, **kwargs)
        with driver.together(module.trainer.global_step):
            return super().training_step(*args, **kwargs)

    def advance(self, optimizer: Optimizer) -> None:
        module: Any = self.lightning_module
        self._equal.advance(module.trainer.current_epoch)

    def rounds(self) -> list[int]:
        return self._equal.rounds()

    def wanted(self) -> list[int]:
        return self._equal.wanted()

    def release(self) -> None:
        self._steps.close()
        self._equal.close()

    # ---- checkpoints: those of ddp, and the cuts ---------------------------------------------------------------------

    def progress_state(self) -> dict[str, Any]:
        if self.driver is None:
            return {}
        return {**remembered(self.driver, self.cuts), **warm_up_state(self.depth, self.driver.assignment)}

    def load_progress_state(self, state: dict[str, Any]) -> None:
        self._saved = state or None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Save one file, worker 0's; Lightning loads it without this package."""
        state = self.progress_state()
        super().save_checkpoint({**checkpoint, **({KEY: state} if state else {})}, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self.load_progress_state(checkpoint.get(KEY, {}) if self.checkpoints.fitting else {})
        return checkpoint

    def introduction(self) -> Sequence[str]:
        return introduced(self.depth, self._module, self.world_size)

    @property
    def sent_bytes(self) -> float:
        """Bytes of gradients that this worker sent since fit began (its part of collective calls)."""
        return self._steps.sent_bytes

    @property
    def wait_seconds(self) -> float:
        """Seconds in which training waited for other workers' gradients since fit began."""
        return self._steps.wait_seconds
