"""Callbacks of partial backprop: log depths and savings, print a table of cuts, or cut under another strategy."""

import statistics
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.optim import Optimizer

from lightning_decentral.partial.agreed import (
    described,
    found_together,
    options,
    refuse_unserved,
    run_of,
    timed,
    warm_up_state,
)
from lightning_decentral.partial.compute.frozen_update import Absent, settle
from lightning_decentral.partial.compute.search import Cuts, search
from lightning_decentral.partial.plan.cost import Balance, compute_fraction, memory_fraction, saved_bytes
from lightning_decentral.partial.plan.depth import DepthAssignment, Temporal
from lightning_decentral.partial.strategy import PartialBackpropStrategy
from lightning_decentral.partial.wire.depth_controller import DepthController
from lightning_decentral.partial.wire.reducer import Rank
from lightning_decentral.shared.compute.device import DeviceStopwatch, HostStopwatch, stopwatch
from lightning_decentral.shared.plan.arguments import at_least, checked


def driver_of(trainer: Trainer) -> DepthController | None:
    """Return the controller of the strategy's cuts; None under other strategies and before the first batch."""
    strategy = trainer.strategy
    return strategy.driver if isinstance(strategy, PartialBackpropStrategy) else None


@checked
class PartialBackpropMonitor(Callback):
    """Log what this worker's steps cost; loggers show worker 0's. Under other strategies the callback does nothing.

    partial/depth              segments that the backward of this step goes through
    partial/backward_seconds   mean seconds of a backward since the last row, without waits for other workers
    partial/saved_bytes        activations saved for a backward of this depth, as counted at the first batch
    partial/sent_bytes         gradients sent per step since the last row

    Cost: reads counters; no communication.

    Raises:
        ValueError: `every_n_steps` below 1.
    """

    def __init__(self, *, every_n_steps: int = 1) -> None:
        at_least(1, "leave the callback out for no log", every_n_steps=every_n_steps)
        self.every_n_steps = every_n_steps
        self._watch: HostStopwatch | DeviceStopwatch = HostStopwatch()
        self._step, self._depth = 0, 0
        self._logged, self._seconds, self._sent = 0, 0.0, 0.0
        self._rows: dict[int, list[tuple[float, float]]] = defaultdict(list)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._watch = stopwatch(pl_module.device)
        self._step = self._logged = trainer.global_step
        self._seconds, self._sent = 0.0, 0.0
        self._rows.clear()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if (driver := driver_of(trainer)) is not None:
            self._depth = driver.depth(trainer.global_step)  # when the batch ends, global_step has increased
        self._watch.start()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._watch.stop()  # before the strategy waits for the means, which isn't part of the backward

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        before, self._step = self._step, trainer.global_step
        due = self._step // self.every_n_steps > before // self.every_n_steps
        if not due or (driver := driver_of(trainer)) is None:
            return
        strategy: Any = trainer.strategy
        steps, seconds, sent = self._step - self._logged, self._watch.seconds(), strategy.sent_bytes
        metrics = {
            "partial/depth": float(self._depth),
            "partial/backward_seconds": (seconds - self._seconds) / steps,
            "partial/saved_bytes": float(saved_bytes(driver.plan.costs[-self._depth :])),
            "partial/sent_bytes": (sent - self._sent) / steps,
        }
        self._logged, self._seconds, self._sent = self._step, seconds, sent
        self._rows[self._depth].append((metrics["partial/backward_seconds"], metrics["partial/sent_bytes"]))
        for name, value in metrics.items():
            pl_module.log(name, value, prog_bar=name == "partial/depth", logger=False)
        # Not by `log`, which keeps a row only every log_every_n_steps; with the step that Lightning logs with.
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)


class PartialBackpropTable(PartialBackpropMonitor):
    """Print a line for each depth on worker 0, at the end of training.

    Steps, medians of saved activations, backward seconds and sent bytes, predicted compute over a full step's."""

    def __init__(self) -> None:
        super().__init__(every_n_steps=1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        driver = driver_of(trainer)
        if driver is None or not (trainer.is_global_zero and self._rows):
            return
        table = Table("depth", "steps", "backward", "saved", "sent", "compute, predicted")
        costs = driver.plan.costs
        for depth, rows in sorted(self._rows.items(), reverse=True):
            seconds, sent = (statistics.median(column) for column in zip(*rows, strict=True))
            table.add_row(
                f"{depth} of {len(costs)}",
                str(len(rows)),
                f"{1000 * seconds:.1f} ms",
                f"{memory_fraction(costs, depth):.2f} x {saved_bytes(costs) / 2**20:.1f} MiB",
                f"{sent / 2**10:,.0f} KiB",
                f"{compute_fraction(costs, depth):.2f}",
            )
        Console().print(table)


@checked
class PartialBackward(Callback):
    """Stop each worker's backward at its own depth, under a strategy that doesn't average gradients.

    With `strategy="gossip"` each worker trains its own depth, and whole parameters are mixed. On one device the cut
    saves compute and memory. Under `ddp` it is refused, as DDP divides gradients by all workers: use
    `strategy="partial_backprop"` there.

    Args:
        depth, cuts, balance, absent: as of `PartialBackpropStrategy`.

    Raises:
        ValueError: impossible cuts; at the first batch, cuts that fail the verification.
    """

    def __init__(
        self,
        *,
        depth: DepthAssignment | None = None,
        cuts: Cuts = "auto",
        balance: Balance | None = None,
        absent: Absent | None = None,
    ) -> None:
        self.depth, self.cuts, self.balance, self.absent, _ = options(depth or Temporal(), cuts, balance, absent)
        self.driver: DepthController | None = None
        self._saved: dict[str, Any] = {}
        self._undo = ExitStack()

    def state_dict(self) -> dict[str, Any]:
        # A resumed run, perhaps longer, keeps the warm-up in steps.
        return {} if self.driver is None else warm_up_state(self.depth, self.driver.assignment)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        refuse_unserved(pl_module)
        # A wrapped model (DDP) averages by itself, also over workers without a gradient.
        if isinstance(trainer.strategy, PartialBackpropStrategy) or trainer.strategy.model is not pl_module:
            name = type(trainer.strategy).__name__
            raise ValueError(
                f"PartialBackward leaves gradients to each worker, but {name} averages them over all: "
                "use strategy='partial_backprop' without this callback, or strategy='gossip' with it"
            )
        strategy: Any = trainer.strategy
        inner = strategy.training_step

        def cut(*args: Any, **kwargs: Any) -> Any:
            driver = self.driver or self._find(trainer, pl_module, *args, **kwargs)
            with driver.alone(trainer.global_step):
                return inner(*args, **kwargs)

        strategy.training_step = cut  # set on this object for this fit: teardown deletes it
        self._undo.callback(delattr, strategy, "training_step")

    def _find(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> DepthController:
        run = run_of(trainer, *args, **kwargs)
        # All workers search and take worker 0's cuts: a measured balance may differ between workers.
        gather: Callable[[Any], list[Any]] = lambda own: [trainer.strategy.broadcast(own)]  # noqa: E731
        plan = found_together(gather, lambda decide: decide(lambda: search(pl_module, self.cuts, self.balance, run)))
        shares = (1 / trainer.world_size,) * trainer.world_size
        self.driver = DepthController(
            pl_module, plan, timed(self.depth, trainer, self._saved), Rank(trainer.global_rank, shares)
        )
        rank_zero_info(described(self.driver, type(pl_module).__name__))
        return self.driver

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.driver is not None:
            self.driver.bypass.end()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self.driver is not None:
            settle(self.absent, optimizer, self.driver.own_absent(trainer.global_step))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._undo.close()
        if self.driver is not None:
            self.driver.remove()
        self.driver = None
