"""So many workers under one strategy in one process: the strategy's own rules, mixers and codecs, and no network.

Gradients are computed one after the other, some at a time (`abreast`), or at once (`stacked`). While workers talk, each
has a thread of its own, one of which runs at a time. Workers that stay equal (`ddp`, `compressed`) have one set of
parameters, updated once. On the CPU every worker's parameters are, bit for bit, those of the run on so many processes
that gets the same batches, each with as many threads of torch's, but where more than two all-reduce, whose sums are
rounded in another order, and where gradients are stacked.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from lightning_decentral.planner.rehearsal.abreast import ThreadPool, nobody_draws
from lightning_decentral.planner.rehearsal.members.member import Member, Place
from lightning_decentral.planner.rehearsal.members.strategies import member_of
from lightning_decentral.planner.rehearsal.noise import NoiseScale
from lightning_decentral.planner.rehearsal.stacked import Stack
from lightning_decentral.planner.rehearsal.worker import Loop, Worker
from lightning_decentral.shared.compute.layout.model import described, refuse_shared
from lightning_decentral.shared.wire.in_process import Mailboxes, in_process_broadcast, in_process_wire

LOOK = 10
"""So many steps apart the noise of gradients is looked at."""


class Crew:
    """Copies of a module, which stays as it is, trained as workers on one device; `with` ends their threads.

    Args:
        batches: of a rank, in order.
        strategy: only read.
        steps: of the whole rehearsal, for what is a share of it.
        per_node: workers on a node, for topologies that ask.
        stacked: gradients are computed at once where the strategy and the batches allow it (`stacked.tried`).
        threads: on which gradients are computed else, where the strategy allows it; steps draw no random numbers then.

    Attributes:
        alike: workers stay equal.
        losses: of each step [workers], each worker's own on its batch, before the update.
        learning_rates: of each step, the first group's.
        noise: of the gradients of workers that stay equal.

    Raises:
        ValueError: the module or the strategy can't be rehearsed.
    """

    def __init__(
        self,
        module: LightningModule,
        batches: Callable[[int], Iterator[Any]],
        strategy: Strategy,
        workers: int,
        steps: int,
        *,
        per_node: int = 1,
        loop: Loop | None = None,
        stacked: bool = False,
        threads: int = 1,
    ) -> None:
        described(module)  # as at the set-up of a run
        refuse_shared(module)  # a copy parts what shares memory
        self._boxes, loop = Mailboxes(), loop or Loop()
        self.workers = [Worker(copy.deepcopy(module), batches(rank), loop) for rank in range(workers)]
        wires = [in_process_wire(self._boxes, rank, workers) for rank in range(workers)]
        told = [in_process_broadcast(self._boxes, rank, workers) for rank in range(workers)]
        where = zip(wires, told, range(workers), strict=True)
        places = [Place(*one, workers, per_node, steps, loop.device) for one in where]
        pairs = zip(self.workers, places, strict=True)
        self.members = [member_of(strategy, one.module, one.optimizer, place) for one, place in pairs]
        self.alike = not any(member.drifts for member in self.members)
        self._updating = self.workers[:1] if self.alike else self.workers
        apart = all(member.stacks for member in self.members)
        self._stack = Stack(self.workers) if stacked and apart else None
        self._pool = ThreadPool(threads) if threads > 1 and apart else None
        self.losses: list[Tensor] = []
        self.learning_rates: list[float] = []
        self.noise = NoiseScale()
        self._threads = ThreadPoolExecutor(workers)

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, *_: object) -> None:
        self._boxes.close()
        self._threads.shutdown()
        if self._pool is not None:
            self._pool.close()

    def train(self, steps: int) -> None:
        """So many further ones."""
        for _ in range(steps):
            if not self.losses:
                self._begin()
            rate = self.learning_rate
            losses = torch.stack(self._gradients())
            if self.alike:
                if len(self.losses) % LOOK == 0:
                    self.noise.see([worker.module for worker in self.workers])
                self._together([member.average for member in self.members])
                self.workers[0].update()
            self._together([member.mix for member in self.members])
            for worker in self._updating:
                worker.schedule()
            self.losses.append(losses)
            self.learning_rates.append(rate)

    @property
    def learning_rate(self) -> float:
        """Of the first group, now."""
        return float(self.workers[0].optimizer.param_groups[0].get("lr", 1.0))

    def drift(self, steps: int) -> None:
        """So many further updates of workers that drift, each by its own gradients, and no word between them."""
        assert not self.alike
        for _ in range(steps):
            self._gradients()
            for worker in self.workers:
                worker.schedule()

    def _begin(self) -> None:
        self._together([member.begin for member in self.members])
        for worker in self.workers[1:] if self.alike else ():
            worker.share(self.workers[0].module)

    def _gradients(self) -> list[Tensor]:
        """Losses; workers that update by their own gradients have done it."""
        if self._stack is None and self._pool is None:
            return [self._one(*pair) for pair in zip(self.workers, self.members, strict=True)]
        batches = [worker.batch() for worker in self.workers]
        losses = self._stack.gradients(batches) if self._stack is not None else None
        if losses is None:
            return self._each(batches)
        for worker in () if self.alike else self.workers:
            worker.update()
        return losses

    def _each(self, batches: Sequence[Any]) -> list[Tensor]:
        rows = self.workers, self.members, batches
        if self._pool is None:
            return list(map(self._one, *rows))
        with nobody_draws(self.workers):
            return self._pool.map(self._one, *rows)

    def _one(self, worker: Worker, member: Member, batch: Any = None) -> Tensor:
        with worker.random:
            loss = worker.gradients(worker.batch() if batch is None else batch, member)
            if not self.alike:
                worker.update()  # now, while the gradients are in the cache
        return loss

    def release(self) -> None:
        """After the last step; messages in flight don't land any more."""
        for member in self.members:
            member.release()

    def _together(self, calls: Sequence[Callable[[], None]]) -> None:
        """Each in turn, and who waits lets others go on; the first error of a worker, not of those that then wait."""
        under_way = [self._threads.submit(self._or_close, call) for call in calls]
        errors = [error for future in under_way if (error := future.exception()) is not None]
        if errors:
            raise next((e for e in errors if not isinstance(e, ConnectionError)), errors[0])

    def _or_close(self, call: Callable[[], None]) -> None:
        try:
            with self._boxes.turn:
                call()
        except BaseException:
            self._boxes.close()
            raise
