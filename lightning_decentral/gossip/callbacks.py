"""Callbacks that log a gossip run: consensus distance, mixing rate, wait and exchange seconds, bytes, worker losses.

Under a strategy that does not gossip these callbacks do nothing. Values go to every logger, at the step that Lightning
logs its own metrics with, and to `trainer.callback_metrics`. The progress bar shows `members` of an elastic run, and
`waiting`, the share of the batches' time spent waiting for other workers."""

import json
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_decentral.gossip.report import StartSummary as StartSummary  # its name in pickles of version 0.2.0
from lightning_decentral.gossip.summary import Monitored
from lightning_decentral.gossip.wire.exchange import Traffic
from lightning_decentral.shared.compute.device import AsyncRead
from lightning_decentral.shared.plan.arguments import at_least, checked
from lightning_decentral.shared.replica_strategy import ReplicaStrategy

KEPT_LOSSES = 8
FIRST, OFTEN, SELDOM = 200, 10, 50  # The consensus error is measured every 10 steps in the first 200, then every 50.
NOTHING: Mapping[str, float] = {}
SEEN = 0.0005  # the progress bar shows three digits: smaller values would stand there as 0.000


class _EveryNSteps(Callback, ABC):
    """Measures when the number of rounds passes a multiple of `every_n_steps`. ValueError: `every_n_steps` below 1."""

    def __init__(self, *, every_n_steps: int = 10) -> None:
        at_least(1, "leave the callback out to measure never", every_n_steps=every_n_steps)
        self.every_n_steps = every_n_steps
        self._steps = self._measured = 0

    def spacing(self, steps: int) -> int:
        """Rounds between measurements after `steps` rounds; the same on every worker."""
        return self.every_n_steps

    @abstractmethod
    def measure(self, trainer: Trainer, pl_module: LightningModule, strategy: Monitored, steps: int) -> None:
        """Measure and log; `steps` is the number of rounds since the last measurement."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # After a resume rounds don't begin at 0.
        self._steps = self._measured = _steps_taken(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Rounds, not batches: the same on every worker, and one per real step under gradient accumulation.
        before, self._steps = self._steps, _steps_taken(trainer)
        every = self.spacing(self._steps)
        if self._steps // every > before // every and isinstance(trainer.strategy, Monitored):
            self.measure(trainer, pl_module, trainer.strategy, self._steps - self._measured)
            self._measured = self._steps


@checked
class ConsensusMonitor(_EveryNSteps):
    """gossip/consensus_distance = sqrt((1/n) sum_i ||x_i - xbar||^2), and _relative = that distance / ||xbar||.

    Cost: each measurement is one blocking all-reduce of the trained parameters, as much as one step of `ddp` sends.
    Choose a large `every_n_steps` for slow links or workers of unequal speed.

    Source: consensus control, Kong et al., ICML 2021, watches the same distance.

    Args:
        every_n_steps: by default each 10th of the first 200 steps, for a curve of a short run, then each 50th.
    """

    def __init__(self, *, every_n_steps: int | None = None) -> None:
        super().__init__(every_n_steps=SELDOM if every_n_steps is None else every_n_steps)
        self._often_at_first = every_n_steps is None

    def spacing(self, steps: int) -> int:
        return OFTEN if self._often_at_first and steps <= FIRST else self.every_n_steps

    def measure(self, trainer: Trainer, pl_module: LightningModule, strategy: Monitored, steps: int) -> None:
        error = strategy.consensus()
        metrics = {"gossip/consensus_distance": error.absolute, "gossip/consensus_distance_relative": error.relative}
        _publish(trainer, pl_module, metrics)


@checked
class CommunicationMonitor(_EveryNSteps):
    """Logs what communication costs worker 0, or each worker with `WandbPerWorker`.

    gossip/wait_seconds        per step since the last row: communication that training did not overlap
    gossip/in_flight_seconds   per step since the last row: from sending to mixing
    gossip/bytes_sent          since fit began; an island's devices have a part each
    gossip/refused_messages    since fit began: messages with NaN, infinity or far too large numbers
    gossip/healed              since fit began: times that this worker replaced bad parameters by its neighbours'
    gossip/left_out_of_mean    since fit began: workers that the mean model left out, once for each mean

    Cost: reads counters; no communication."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A strategy's counters start anew with every fit.
        super().on_train_start(trainer, pl_module)
        self._before, self._seconds = Traffic(), 0.0
        self._shows_waiting = False  # From the first value over 0 on: then 0 too, or the bar would keep the old one.

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._began = time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._seconds += time.monotonic() - self._began
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def measure(self, trainer: Trainer, pl_module: LightningModule, strategy: Monitored, steps: int) -> None:
        before, now = self._before, strategy.traffic()
        waited, seconds = now.wait_seconds - before.wait_seconds, self._seconds
        self._before, self._seconds = now, 0.0
        metrics: dict[str, float] = {
            "gossip/wait_seconds": waited / steps,
            "gossip/in_flight_seconds": (now.in_flight_seconds - before.in_flight_seconds) / steps,
            "gossip/bytes_sent": now.bytes_sent,
            "gossip/refused_messages": now.refused,
            "gossip/left_out_of_mean": now.left_out,
            "gossip/healed": now.healed,
        }
        waiting = min(1.0, waited / seconds) if seconds else 0.0
        self._shows_waiting |= waiting >= SEEN
        _publish(trainer, pl_module, metrics, {"waiting": waiting} if self._shows_waiting else {})


@checked
class MixingMonitor(_EveryNSteps):
    """Logs how this worker mixes: each value of `strategy.mixing()` as gossip/<name>, if its rule or codec has it.

    gossip/mixing_rate          how far a worker moves towards what it received; 1 takes the mixture
    gossip/delay                rounds between sending and mixing
    gossip/codec_error          ||decoded - message|| relative to what was left to send, in the last measured round
    gossip/consensus_target     relative distance above which `ConsensusControl` mixes more
    gossip/consensus_measured   relative distance as last measured over all workers

    Elastic runs also log gossip/members, gossip/view, gossip/joins, gossip/losses, gossip/leaves, gossip/participation
    and gossip/stall_seconds; asynchronous runs gossip/age and gossip/left_out_rounds, too."""

    def measure(self, trainer: Trainer, pl_module: LightningModule, strategy: Monitored, steps: int) -> None:
        metrics = {f"gossip/{name}": value for name, value in strategy.mixing().items()}
        members = metrics.get("gossip/members")
        _publish(trainer, pl_module, metrics, {} if members is None else {"members": members})


@checked
class WorkerLossMonitor(_EveryNSteps):
    """worker/{k}/loss = mean training loss of worker k over its batches since the last row; worker 0 logs all workers'.

    Cost: every `every_n_steps` steps each worker writes a few numbers into the run's key-value store, and worker 0
    reads all. No worker waits: losses of a slower worker, or a GPU, are logged later, at the step of the loss."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._losses: list[Tensor] = []
        self._arriving: tuple[int, AsyncRead] | None = None
        self._recent: deque[tuple[int, float]] = deque(maxlen=KEPT_LOSSES)
        self._logged = [_log_step(trainer) - 1] * trainer.world_size

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Lightning divides by the number of accumulated batches before it hands the loss on.
        scale = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        # The loss in what a training step handed back, if there is one.
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        self._losses += [loss.detach() * scale] if isinstance(loss, Tensor) else []
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def measure(self, trainer: Trainer, pl_module: LightningModule, strategy: Monitored, steps: int) -> None:
        if self._losses:
            self._read()
            self._arriving = _log_step(trainer), AsyncRead(torch.stack(self._losses).mean())
            self._losses = []
            if self._arriving[1].on_host:  # a device's value is read later: the host would wait for it now
                self._read()
        self._share(trainer)

    def _read(self) -> None:
        if self._arriving is not None:
            (step, loss), self._arriving = self._arriving, None
            # The last few: a worker may write several times before worker 0 looks.
            self._recent.append((step, float(loss.read())))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # What slower workers wrote meanwhile: all have ended the epoch.
        if isinstance(trainer.strategy, Monitored):
            self._read()
            self._share(trainer)

    def _share(self, trainer: Trainer) -> None:
        rows = _posted(trainer, list(self._recent))
        if not trainer.is_global_zero:
            return
        found: dict[int, dict[str, float]] = defaultdict(dict)
        for rank, row in enumerate(rows):
            for step, loss in [pair for pair in row if pair[0] > self._logged[rank]]:
                found[step][f"worker/{rank}/loss"] = loss
                self._logged[rank] = step
        for step in sorted(found):
            _log(trainer, found[step], step)


def _steps_taken(trainer: Trainer) -> int:
    """Rounds taken so far, or updates where a single worker takes no rounds."""
    strategy = trainer.strategy
    rounds = strategy.rounds() if isinstance(strategy, Monitored) else []
    return max(rounds, default=trainer.global_step)


def _log_step(trainer: Trainer) -> int:
    # The step of Lightning's own rows.
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def _log(trainer: Trainer, metrics: Mapping[str, float], step: int) -> None:
    for logger in trainer.loggers:
        logger.log_metrics(dict(metrics), step=step)


def _publish(
    trainer: Trainer, pl_module: LightningModule, metrics: Mapping[str, float], on_bar: Mapping[str, float] = NOTHING
) -> None:
    for name, value in {**metrics, **on_bar}.items():
        # To the loggers directly: by `pl_module.log` they would repeat a value until the next one.
        pl_module.log(name, float(value), prog_bar=name in on_bar, logger=False)
    _log(trainer, metrics, _log_step(trainer))


def _posted(trainer: Trainer, mine: list[tuple[int, float]]) -> list[list[tuple[int, float]]]:
    """Write this worker's (step, loss) pairs; worker 0 reads all workers', or nothing before all have written once."""
    strategy = trainer.strategy
    wire = strategy.wire if isinstance(strategy, ReplicaStrategy) else None
    if wire is None:
        return [mine]
    keys = [f"loss/{rank}" for rank in range(trainer.world_size)]
    wire.store.set(keys[trainer.global_rank], json.dumps(mine))
    # `multi_get` would wait for a worker that hasn't written yet.
    if not trainer.is_global_zero or not wire.store.check(keys):
        return []
    return [[(int(step), float(loss)) for step, loss in json.loads(text)] for text in wire.store.multi_get(keys)]
