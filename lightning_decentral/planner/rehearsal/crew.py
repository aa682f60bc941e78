"""Workers of one strategy in one process: Lightning's own loop, the strategy's own rules, mixers and codecs.

Each worker is a Trainer in a thread, one of which runs at a time: a worker that waits for a message, or for further
steps, lets another run. Gradients are computed one after the other, or some at a time (`turns`). On the CPU every
worker's parameters are, bit for bit, those of a run on as many processes, with the same batches and the same number of
torch's threads. Only where more than two workers all-reduce are sums rounded in another order."""

import copy
import logging
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import BrokenBarrierError, Thread
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.warnings import PossibleUserWarning
from torch import Tensor
from torch.optim import LBFGS

from lightning_decentral.planner.noise import NoiseScale
from lightning_decentral.planner.rehearsal.binding import Common
from lightning_decentral.planner.rehearsal.loop_settings import LoopSettings
from lightning_decentral.planner.rehearsal.member import Member, MemberPlace
from lightning_decentral.planner.rehearsal.turns import Abreast, OwnTurn, Quota, Way, WorkersBarrier
from lightning_decentral.planner.rehearsal.worker import RehearsedWorker
from lightning_decentral.shared.compute.layout import described, refuse_shared
from lightning_decentral.shared.wire.in_process import Mailboxes, in_process_broadcast, in_process_wire


class Crew(AbstractContextManager["Crew"]):
    """Trains copies of a module, which doesn't change, as workers on one device; `with` ends their threads. ValueError:
    the module or the strategy can't be rehearsed."""

    def __init__(
        self,
        module: LightningModule,
        batches: Callable[[int], Any],  # (rank) -> data for `Trainer.fit`, or the rank's batches in order
        strategy: object,  # strategy to rehearse, only read
        workers: int,
        steps: int,  # steps of the whole rehearsal, for settings that are a share of it
        *,
        per_node: int = 1,  # workers on a node, for topologies that depend on it
        loop: LoopSettings | None = None,
        threads: int = 1,  # that compute gradients, if the strategy allows it and steps draw no random numbers
    ) -> None:
        described(module)  # as a run does at set-up
        refuse_shared(module)  # a copy would separate tensors that share memory
        loop = loop or LoopSettings()
        boxes, turn, self.noise = Mailboxes(), OwnTurn(loop.device), NoiseScale()
        boxes.turn = turn
        look = WorkersBarrier(turn, workers, lambda: self.noise.see([worker.module for worker in self.workers]))
        meet = WorkersBarrier(turn, workers)
        folder = tempfile.mkdtemp(prefix="rehearsal-")
        self._tidy = weakref.finalize(self, shutil.rmtree, folder, True)
        self._common = Common(strategy, loop, boxes, turn, Quota(turn, workers), look, meet, folder)
        self._boxes, self._steps, self.device = boxes, 0, loop.device
        self.losses: list[Tensor] = []  # [workers] for each step: on the worker's batch, before the update

        def placed(rank: int) -> MemberPlace:
            wire, hands = in_process_wire(boxes, rank, workers), in_process_broadcast(boxes, rank, workers)
            in_turn = lambda: self._common.way.end(rank)  # noqa: E731  # the way is known later
            return MemberPlace(wire, hands, meet, in_turn, rank, workers, per_node, steps, loop.device)

        with _silence():
            self.workers = [
                RehearsedWorker(copy.deepcopy(module), batches(rank), placed(rank), self._common)
                for rank in range(workers)
            ]
        self._threads = [Thread(target=worker.run, daemon=True) for worker in self.workers]
        try:
            with self._running():
                for thread in self._threads:
                    thread.start()
                self._common.quota.allow(0)
            self._to(0)
            self._common.way = self._way(threads)
        except BaseException:
            self.__exit__()
            raise

    @property
    def way(self) -> Way:
        """Way of computing gradients: one worker after the other, or several at a time."""
        return self._common.way

    def _way(self, threads: int) -> Way:
        first = self.workers[0]
        concurrent = all(member.concurrent for member in self.members)
        concurrent &= not isinstance(first.binding.optimizers[0], LBFGS)  # unequal numbers of gradients
        if threads == 1 or not concurrent:
            return Way()
        return Abreast(type(first.module).__name__, len(self.workers), self._common.turn, threads)

    @property
    def members(self) -> list[Member]:
        return [worker.binding.member for worker in self.workers]

    @property
    def alike(self) -> bool:  # whether workers stay equal
        return not any(member.drifts for member in self.members)

    @property
    def learning_rates(self) -> list[float]:
        return self.workers[0].binding.learning_rates

    @property
    def learning_rate(self) -> float:
        """Present learning rate of the first parameter group."""
        return self.workers[0].binding.rates_now()[0]

    def __exit__(self, *_: object) -> None:
        self._common.close()
        with self._running():
            for thread in self._threads:
                thread.join()
        self._tidy()

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Let workers' threads run meanwhile; otherwise they wait for turns."""
        common = self._common
        with _silence(), common.world.installed(), common.turn.of_workers(), common.way.shared():
            yield

    def train(self, steps: int) -> None:
        """Train for `steps` further steps."""
        self._to(self._steps + steps)

    def drift(self, steps: int) -> None:
        """Make `steps` further updates of drifting workers, each by its own gradients, without messages."""
        assert not self.alike
        self._common.mixes = False
        for worker in self.workers:
            worker.goes_on()
        self._to(self._steps + steps)
        self._common.mixes = True

    def _to(self, steps: int) -> None:
        with self._running():
            self._common.quota.allow(steps)
        errors = [worker.error for worker in self.workers if worker.error is not None]
        for error in errors:
            if not isinstance(error, (ConnectionError, BrokenBarrierError)):  # of waits ended by another's error
                raise error
        rows = [worker.binding.losses for worker in self.workers]
        taken = min(map(len, rows))
        if taken < steps or errors:
            name = type(self.workers[0].module).__name__
            raise ValueError(f"the training of {name} ended after {taken} of {steps} steps: rehearse fewer steps")
        self.losses += [torch.stack(losses) for losses in list(zip(*rows, strict=True))[self._steps :]]
        self._steps = steps

    def release(self) -> None:
        """Release the workers after the last step, without mixing messages in flight."""
        for member in self.members:
            member.release()


@contextmanager
def _silence() -> Iterator[None]:
    """Silence the Trainers' messages on devices and data loaders."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PossibleUserWarning)
            warnings.filterwarnings("ignore", module=r"lightning\.")
            yield
    finally:
        logger.setLevel(level)
