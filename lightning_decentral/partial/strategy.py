"""`Trainer(strategy="partial_backprop")`: data-parallel training in which the backward stops at a cut."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_decentral.partial.agreed import found_together, remembered, wished
from lightning_decentral.partial.compute.frozen_update import Absent, Skip, settle
from lightning_decentral.partial.compute.search import CutPlan, Cuts, check_wish, search
from lightning_decentral.partial.compute.uneven_batches import shared
from lightning_decentral.partial.dry_run import refuse_unserved, run_of, timed, warm_up_state
from lightning_decentral.partial.plan.cost import Balance, SavedBytes
from lightning_decentral.partial.plan.depth import DepthAssignment, Temporal
from lightning_decentral.partial.start import described
from lightning_decentral.partial.wire.depth_controller import DepthController
from lightning_decentral.partial.wire.reducer import Rank, Reducer
from lightning_decentral.shared.compute.modules import same
from lightning_decentral.shared.meeting import TIMEOUT
from lightning_decentral.shared.nonfinite import GradientCheck, NonFinite
from lightning_decentral.shared.plan.arguments import checked
from lightning_decentral.shared.replica import ReplicaStrategy
from lightning_decentral.shared.updates import Mixed
from lightning_decentral.shared.wire.gradients import at_the_end
from lightning_decentral.shared.wire.meeting.layouts import Layouts, Trained, Unasked
from lightning_decentral.shared.wire.running_buffers import RunningBuffers
from lightning_decentral.shared.wire.transport import Wire

KEY = "partial_backprop"


@checked
class PartialBackpropStrategy(ReplicaStrategy):
    """grad of segment s = mean over exactly the workers that train s; those below every cut don't move.

    The network is cut into segments. At each optimizer step every worker trains the top `depth` of them: what lies
    below runs without a graph, which saves its backward, its saved activations and its gradients' traffic. All replicas
    take the same update and stay bit-equal. The first batch finds and verifies the cuts on a copy of the module.

    Args:
        depth: how deep each worker goes at each step.
        cuts: "auto", up to three cuts along the chain of blocks found; a number of them; "blocks", before each block
            and behind the last; or names of modules before whose inputs to cut.
        balance: what the segments of automatic cuts have equally much of.
        absent: what the optimizer does to parameters that no worker trained at a step.
        bucket_bytes: gradients that travel together, at most; by default an eighth of the model, 2 to 256 MiB.
        nonfinite: what a step does whose gradients hold NaN or infinity: "stop" ends training, "skip" takes it without
            an update, on all workers alike. In half precision the loss scaler skips.
        timeout: how long a worker waits for another, anywhere, before it ends.
        **ddp: what Lightning's DDPStrategy itself takes (start_method, process_group_backend, ...).

    Raises:
        ValueError: here for an unknown option or impossible cuts; at set-up for SyncBatchNorm, manual optimization,
            an overridden backward; at the first batch, on every worker, for cuts that aren't (with the reason).

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
        check_wish(cuts)
        if bucket_bytes is not None and bucket_bytes <= 0:
            raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}: leave it out for the default")
        self.depth = depth or Temporal()
        self.cuts = cuts
        self.balance = balance or SavedBytes()
        self.absent = absent or Skip()
        self.bucket_bytes = bucket_bytes
        self.nonfinite, self.gradient_check = nonfinite, GradientCheck(nonfinite)
        self.driver: DepthController | None = None  # the cuts in use, from the first batch on
        self._reducer: Reducer | None = None
        self._buffers: RunningBuffers | None = None
        self._layouts: Layouts | Unasked = Unasked()
        self.followed = self
        self._saved: dict[str, Any] | None = None
        self._rounds: int | None = None  # outside of training, also in the process that started the workers
        self._samples: tuple[int, ...] = ()
        self._served: list[nn.Parameter] = []
        self._blocked = False
        self._epoch = -1

    # ---- set-up -----------------------------------------------------------------------------------------------------

    def refuse(self, module: nn.Module, fitting: bool) -> None:
        if self._layer_sync is not None or any(isinstance(m, nn.SyncBatchNorm) for m in module.modules()):
            raise ValueError(
                "SyncBatchNorm gathers over all workers in every layer's backward, and a worker that stops above it "
                "never comes: use plain BatchNorm (with worker 0's running statistics), GroupNorm or LayerNorm"
            )
        super().refuse(module, fitting)

    def prepare(self, wire: Wire | None) -> None:
        """The cuts wait for the first batch."""
        refuse_unserved(self._module)
        self._rounds, self._epoch = 0, -1
        if wire is not None:
            buffers = wire.group(None)
            assert buffers is not None
            self._buffers = RunningBuffers(self._module, buffers)
            self._layouts = self._attendance.layouts(Trained(self._module.named_parameters, lambda: self.optimizers))

    def replaced(self) -> None:
        self._layouts.changed()

    def mixed(self) -> Sequence[Mixed]:
        """Nothing: gradients are averaged."""
        return ()

    def _find_cuts(self, *batch: Any, **kwargs: Any) -> DepthController:
        run, wish = run_of(self._module.trainer, *batch, **kwargs), wished(self.cuts, self._saved)
        return self._drive(
            found_together(self.gather, lambda decide: search(self._module, wish, self.balance, run, decide))
        )

    def _drive(self, plan: CutPlan) -> DepthController:
        place = Rank(self.global_rank, self._shares())
        driver = DepthController(self._module, plan, timed(self.depth, self._module.trainer, self._saved or {}), place)
        if self.wire is not None:
            self._reducer = Reducer(driver.segments, place, self.wire.group, self.wire.hosts, self.bucket_bytes)
            assert self._buffers is not None
            self._reducer.news, self._reducer.layouts = self._buffers.changed, self._layouts
        self.driver, self._saved = driver, None
        rank_zero_info(described(driver, type(self._module).__name__))
        return driver

    def process_dataloader(self, dataloader: object) -> object:
        shares = [self.depth.share(rank, self.world_size) for rank in range(self.world_size)]
        if not self._module.trainer.training or len(set(shares)) == 1:
            return dataloader
        loader, self._samples = shared(dataloader, shares)
        return loader

    def _shares(self) -> tuple[float, ...]:
        """Of the samples of a global batch."""
        samples = self._samples or (1,) * self.world_size
        return tuple(n / sum(samples) for n in samples)

    # ---- one step ---------------------------------------------------------------------------------------------------

    @property
    def _step(self) -> int:
        return int(self._module.trainer.global_step)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        driver = self.driver or self._find_cuts(*args, **kwargs)
        with driver.together(self._step):
            return super().training_step(*args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        self._blocked = True
        try:
            yield
        finally:
            self._blocked = False

    def pre_backward(self, closure_loss: Tensor) -> None:
        if not self._blocked:  # only the last backward of an accumulated step sends
            self._begin()
        at_the_end(closure_loss, self._after_backward)

    def _after_backward(self) -> None:
        # Within the backward: what hooks of the user's see and change behind it is what the update takes.
        if self.driver is not None:
            self.driver.bypass.end()
        if not self._blocked:
            self._finish()

    def _begin(self) -> None:
        if self._reducer is not None and self.driver is not None:
            with self.driver.bypass.lifted():
                self._reducer.refresh()
            self._reducer.begin(self.driver.contributors(self._step))

    def _finish(self) -> None:
        if self._reducer is not None:
            with self._attendance.waiting:
                self._reducer.finish()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        step = self._step  # the update moves it on

        def averaged() -> Any:
            loss = closure()  # with the backward, in the first batch with the search for cuts
            if self.driver is not None:
                settle(self.absent, optimizer, self.driver.absent(step))
            return loss

        self._refuse_new(optimizer)
        return super().optimizer_step(optimizer, averaged, model, **kwargs)

    def _refuse_new(self, optimizer: Optimizer) -> None:
        now = [p for group in optimizer.param_groups for p in group["params"]]
        if self._reducer is not None and not same(now, self._served):
            self._reducer.serve(now)
            self._served = now

    def advance(self, optimizer: Optimizer) -> None:
        # Once an epoch, look which further buffers have changed: comparing all takes time.
        look, self._epoch = self._epoch != self._module.trainer.current_epoch, self._module.trainer.current_epoch
        assert self._rounds is not None
        if self._buffers is not None:
            self._buffers.share((self._reducer is not None and self._reducer.heard()) or look)
        self._rounds += 1  # not before: who waits in `share` waits for this update, not for the next one

    # ---- rounds -----------------------------------------------------------------------------------------------------

    def rounds(self) -> list[int]:
        return [] if self._rounds is None else [self._rounds]

    def wanted(self) -> list[int]:
        """All must come to the update that this worker waits for."""
        return [rounds + 1 for rounds in self.rounds()]

    def release(self) -> None:
        if self.driver is not None:
            self.driver.remove()
        if self._reducer is not None:
            self._reducer.close()
        self._layouts.close()
        self._layouts = Unasked()
        self.driver, self._reducer, self._buffers, self._rounds = None, None, None, None

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
        """One file, worker 0's; any Lightning loads it."""
        state = self.progress_state()
        super().save_checkpoint({**checkpoint, **({KEY: state} if state else {})}, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self.load_progress_state(checkpoint.get(KEY, {}) if self.checkpoints.fitting else {})
        return checkpoint

    # ---- what users watch -------------------------------------------------------------------------------------------

    @property
    def sent_bytes(self) -> float:
        """Gradients that this worker sent since fit began (its part of collective calls)."""
        return 0.0 if self._reducer is None else self._reducer.sent_bytes
