"""A gossip training of n workers rehearsed in one process: the strategy's own mixers, rules and codecs, no network.

The workers' gradients and updates are computed one after the other; only while they mix has each a thread of its own.
On the CPU every worker's parameters are, bit for bit, those of the run on n processes that gets the same batches, but
where groups of more than two all-reduce: sums are rounded in another order there.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_decentral.gossip.compute.healing import Healing, first_poisoned
from lightning_decentral.gossip.strategy import GossipStrategy
from lightning_decentral.gossip.wire.assembly import assembled
from lightning_decentral.gossip.wire.consensus import mixer_of
from lightning_decentral.gossip.wire.island_member import IslandMember
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.gossip.wire.optimizer_mixer import Mixers
from lightning_decentral.shared.wire.in_process import InProcessTransport, Mailboxes
from lightning_decentral.shared.wire.transport import Transport

CPU = torch.device("cpu")


@dataclass
class Rehearsal:
    """What became of the workers.

    Attributes:
        losses: [steps, workers], each worker's own on its batch, before the update.
        modules: of all workers, after the last step; messages in flight have not landed.
        bytes_sent: by each worker.
    """

    losses: Tensor
    modules: list[LightningModule]
    bytes_sent: list[int]


def rehearse(
    module: LightningModule,
    batches: Callable[[int], Iterable[Any]],
    strategy: GossipStrategy,
    workers: int,
    steps: int,
    *,
    per_node: int = 1,
    clip_norm: float | None = None,
) -> Rehearsal:
    """Train copies of a module, which stays as it is, as so many gossiping workers, on the CPU.

    `configure_optimizers` of the module is called for each; it may return one optimizer and a scheduler of steps.
    Callbacks, hooks, `self.log` and a trainer there are none: `global_rank` and `global_step` are 0.

    Args:
        batches: of a rank, in order, at least `steps`.
        strategy: whose topology, rule, weights, codec, delay and bucket_bytes are rehearsed. It is only read.
        per_node: workers on a node, for topologies that ask.
        clip_norm: the trainer's `gradient_clip_val`.

    Raises:
        ValueError: manual optimization, several optimizers, islands of several devices, a scheduler of epochs, too few
            batches, or what the strategy itself refuses.
    """
    _check(module, strategy, workers, per_node)
    crew = _crew(module, batches, strategy, workers, per_node)
    losses = torch.zeros(steps, workers, dtype=torch.float64)
    with ThreadPoolExecutor(workers) as threads:
        # Making groups, and admitting parameters to a codec, is collective.
        _together(threads, [worker.adopt for worker in crew])
        for step in range(steps):
            losses[step] = torch.stack([worker.update(clip_norm) for worker in crew])
            _together(threads, [worker.mix for worker in crew])
            for worker in crew:
                worker.schedule()
        sent = [sum(of.mixer.exchange.traffic().bytes_sent for of in worker.mixers) for worker in crew]
        for worker in crew:
            worker.mixers.release()
    return Rehearsal(losses, [worker.module for worker in crew], sent)


def _check(module: LightningModule, strategy: GossipStrategy, workers: int, per_node: int) -> None:
    if not module.automatic_optimization:
        raise ValueError(f"{type(module).__name__} optimizes by hand: only automatic optimization can be rehearsed")
    if strategy.island.devices > 1:
        raise ValueError(f"workers of one device are rehearsed, not {strategy.island}: leave island out")
    topology = strategy.topology.placed(per_node)
    strategy.combine.check(topology, workers, strategy.weights, strategy.delay)


def _crew(
    module: LightningModule,
    batches: Callable[[int], Iterable[Any]],
    strategy: GossipStrategy,
    workers: int,
    per_node: int,
) -> "list[_Worker]":
    boxes = Mailboxes()
    return [
        _Worker(copy.deepcopy(module), batches(rank), strategy, _Place(boxes, rank, workers, per_node))
        for rank in range(workers)
    ]


def _together(threads: ThreadPoolExecutor, calls: "Sequence[Callable[[], None]]") -> None:
    """All at once; the first error of a worker, not of those that then wait for it in vain."""
    under_way = [threads.submit(call) for call in calls]
    errors = [error for future in under_way if (error := future.exception()) is not None]
    if errors:
        raise next((e for e in errors if not isinstance(e, ConnectionError)), errors[0])


class _Place(IslandMember):
    """A single device among workers of this process."""

    def __init__(self, boxes: Mailboxes, rank: int, size: int, per_node: int) -> None:
        super().__init__(None, 1, lambda call: call())
        self.boxes, self.rank, self.size, self.per_node, self._made = boxes, rank, size, per_node, 0

    def peers(self, workers: Sequence[int]) -> Transport | None:
        name, self._made = self._made, self._made + 1
        among = list(workers)
        return InProcessTransport(self.boxes, name, among.index(self.rank), len(among)) if self.rank in among else None


class _Worker:
    """One worker's module, optimizer, batches, random numbers and mixers."""

    def __init__(
        self, module: LightningModule, batches: Iterable[Any], strategy: GossipStrategy, place: _Place
    ) -> None:
        self.module, self._strategy, self._place = module.train(), strategy, place
        self._optimizer, self._schedulers = _configured(module)
        self._batches: Iterator[Any] = iter(batches)
        self._count, self._random = 0, torch.get_rng_state()
        self.mixers = Mixers(self._mixer, self._packed)

    def _packed(self, parameters: Sequence[nn.Parameter]) -> Any:
        return self._place.pack(parameters, self._strategy.bucket_bytes)

    def _mixer(self) -> Mixer:
        of, place = self._strategy, self._place
        plan = of.topology.placed(place.per_node), of.weights, place.size, place.rank
        exchange = assembled(*plan, place, CPU, of.codec, of.delay)
        mixer = mixer_of(of.combine, exchange, of.delay, partial(place.peers, range(place.size)))
        heals = 0 if of.codec.remembers else of.heals
        mixer.healing = Healing(heals, lambda: first_poisoned(self.module.named_parameters()))
        return mixer

    def adopt(self) -> None:
        self._or_close(lambda: self.mixers.of(self._optimizer).adopt())

    def mix(self) -> None:
        self._or_close(lambda: self.mixers.step(self._optimizer))

    def _or_close(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException:
            self._place.boxes.close()
            raise

    def update(self, clip_norm: float | None) -> Tensor:
        """One update on the next batch, with this worker's random numbers; its loss."""
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._random)
            loss = self._gradients()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(self._optimizer.param_groups[0]["params"], clip_norm)
            self._optimizer.step()
            self._random = torch.get_rng_state()
        return loss

    def _gradients(self) -> Tensor:
        batch = next(self._batches, None)
        if batch is None:
            raise ValueError(f"worker {self._place.rank} has {self._count} batches only: rehearse fewer steps")
        output: Any = self.module.training_step(batch, self._count)
        loss: Tensor = output["loss"] if isinstance(output, dict) else output
        self._optimizer.zero_grad()
        loss.backward()
        self._count += 1
        return loss.detach().double()

    def schedule(self) -> None:
        for scheduler in self._schedulers:
            scheduler.step()


def _configured(module: LightningModule) -> tuple[Optimizer, list[Any]]:
    """The optimizer, and the schedulers of steps."""
    found: Any = module.configure_optimizers()
    if isinstance(found, Optimizer):
        return found, []
    if not isinstance(found, dict):
        raise ValueError(f"configure_optimizers gave {type(found).__name__}: return one optimizer, or a dict with it")
    scheduler = found.get("lr_scheduler")
    if scheduler is None:
        return found["optimizer"], []
    if not isinstance(scheduler, dict) or scheduler.get("interval") != "step" or scheduler.get("frequency", 1) != 1:
        raise ValueError('only schedulers of every step can be rehearsed: {"scheduler": ..., "interval": "step"}')
    return found["optimizer"], [scheduler["scheduler"]]
