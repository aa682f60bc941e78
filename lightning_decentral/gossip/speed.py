"""Callback that logs the speed of a run, under every strategy: so two runs of different strategies share a chart."""

from time import perf_counter
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_decentral.gossip.callbacks import Monitored, _publish
from lightning_decentral.shared.plan.arguments import at_least, checked


@checked
class SpeedMonitor(Callback):
    """Log this worker's speed under any strategy, `ddp` too, so that runs are compared on one chart.

    speed/step_seconds         seconds per step, its data included
    speed/samples_per_second   of this worker: the length of what a batch has first
    speed/tokens_per_second    the same times the columns, where that is a matrix of integers
    speed/wait_share           share of the time in which training waited for the exchange, where the strategy counts it
    speed/bytes_per_second     sent, where the strategy counts it; under `ddp` as a ring's all-reduce of gradients sends

    Means of `every_n_steps` steps, from the second such window on: set-up isn't in it, nor is validation.

    Cost: reads the clock and counters; no communication.

    Raises:
        ValueError: `every_n_steps` below 1.
    """

    def __init__(self, *, every_n_steps: int = 10) -> None:
        at_least(1, "leave the callback out to measure never", every_n_steps=every_n_steps)
        self.every_n_steps = every_n_steps
        self._began: float | None = None  # of this window; the first one is set-up's
        self._paused = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = None
        self._step, self._samples, self._tokens = trainer.global_step, 0, 0
        self._before = _counted(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._paused = perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._began is not None:
            self._began += perf_counter() - self._paused

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        first = next((leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim > 0), None)
        if first is not None:
            self._samples += len(first)
            words = first.ndim == 2 and not first.is_floating_point() and not first.is_complex()
            self._tokens += first.numel() if words else 0
        steps = trainer.global_step - self._step
        if steps < self.every_n_steps:
            return
        now, began, before = perf_counter(), self._began, self._before
        after = _counted(trainer)
        if began is not None:
            seconds = max(now - began, 1e-9)
            rates = {"speed/samples_per_second": self._samples, "speed/tokens_per_second": self._tokens}
            metrics = {key: count / seconds for key, count in rates.items() if count}
            metrics["speed/step_seconds"] = seconds / steps
            if "waited" in after:
                metrics["speed/wait_share"] = (after["waited"] - before.get("waited", 0.0)) / seconds
            if "sent" in after:
                metrics["speed/bytes_per_second"] = (after["sent"] - before.get("sent", 0.0)) / seconds
            _publish(trainer, pl_module, metrics)
        self._began, self._before = now, after
        self._step, self._samples, self._tokens = trainer.global_step, 0, 0


@runtime_checkable
class CountsBytes(Protocol):
    """Strategy that counts what this worker sends."""

    @property
    def sent_bytes(self) -> float:
        """Bytes sent since fit began."""


def _counted(trainer: Trainer) -> dict[str, float]:
    """Seconds waited and bytes sent since fit began, as far as they are known."""
    strategy = trainer.strategy
    if isinstance(strategy, Monitored):
        traffic = strategy.traffic()
        return {"waited": traffic.wait_seconds, "sent": traffic.bytes_sent}
    if isinstance(strategy, CountsBytes):
        return {"sent": strategy.sent_bytes}
    if type(strategy) is DDPStrategy and strategy._ddp_comm_hook is None:
        size, module = strategy.world_size, trainer.lightning_module
        gradients = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
        return {"sent": 2 * (size - 1) / size * gradients * trainer.global_step}
    return {}
