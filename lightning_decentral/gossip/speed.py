"""Callback that logs the speed of a run under any strategy, so that runs of different strategies share a chart."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from time import perf_counter
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_decentral.gossip.callbacks import _publish
from lightning_decentral.gossip.summary import Monitored
from lightning_decentral.shared.plan.arguments import at_least, checked


@checked
class SpeedMonitor(Callback):
    """Logs this worker's speed under any strategy, `ddp` too, so that runs are compared on one chart.

    speed/step_seconds         seconds per step, loading of data included
    speed/samples_per_second   samples of this worker: the length of a batch's first tensor
    speed/tokens_per_second    tokens of this worker, if the batch's first tensor is a matrix of integers
    speed/wait_share           share of the time in which training waited for the exchange, if the strategy counts it
    speed/bytes_per_second     bytes sent, if the strategy counts them; under `ddp` those of a ring all-reduce

    Each row is a mean over a window of `every_n_steps` steps, from the second window on. Set-up and validation don't
    count, checkpoints do. A run shorter than two windows logs nothing. All optimizers' steps on a batch are one step.

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
        self._steps = self._measured = self._samples = self._tokens = 0
        self._before = _counted(trainer, 0)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._paused = perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._began is not None:
            self._began += perf_counter() - self._paused

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        first = next(_tensors(batch), None)
        if first is not None:
            self._samples += len(first)
            tokens = first.ndim == 2 and not first.is_floating_point() and not first.is_complex()
            self._tokens += first.numel() if tokens else 0
        self._steps += not trainer.fit_loop._should_accumulate()
        steps = self._steps - self._measured
        if steps < self.every_n_steps:
            return
        now, began, before = perf_counter(), self._began, self._before
        after = _counted(trainer, self._steps)
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
        self._began, self._before, self._measured = now, after, self._steps
        self._samples = self._tokens = 0


@runtime_checkable
class CountsTraffic(Protocol):
    """Interface of a strategy that counts what this worker sends and waits for."""

    @property
    def sent_bytes(self) -> float:
        """Bytes sent since fit began."""

    @property
    def wait_seconds(self) -> float:
        """Seconds in which training waited for other workers since fit began."""


def _tensors(batch: Any) -> Iterator[Tensor]:
    """Tensors of a batch with at least one axis, in order; looks into any mapping and into dataclasses, too."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            yield from [leaf] if leaf.ndim else []
        elif isinstance(leaf, Mapping):
            yield from _tensors([*leaf.values()])
        elif is_dataclass(leaf):
            yield from _tensors([getattr(leaf, field.name) for field in fields(leaf)])


def _counted(trainer: Trainer, steps: int) -> dict[str, float]:
    """Seconds waited and bytes sent since fit began, `steps` steps ago, as far as the strategy counts them."""
    strategy = trainer.strategy
    if isinstance(strategy, Monitored):
        traffic = strategy.traffic()
        return {"waited": traffic.wait_seconds, "sent": traffic.bytes_sent}
    if isinstance(strategy, CountsTraffic):
        return {"waited": strategy.wait_seconds, "sent": strategy.sent_bytes}
    if type(strategy) is DDPStrategy and strategy._ddp_comm_hook is None:
        size, module = strategy.world_size, trainer.lightning_module
        gradients = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
        return {"sent": 2 * (size - 1) / size * gradients * steps}
    return {}
