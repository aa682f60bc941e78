"""Partial backprop in a rehearsal: the strategy's own cuts, depths and reducer, on one worker of this process."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

from lightning.pytorch import LightningModule
from torch.optim import Optimizer

from lightning_decentral.partial.agreed import agreed
from lightning_decentral.partial.compute.frozen_update import settle
from lightning_decentral.partial.compute.search import CutPlan, search
from lightning_decentral.partial.dry_run import refuse_unserved, run_of
from lightning_decentral.partial.strategy import PartialBackpropStrategy
from lightning_decentral.partial.wire.depth_controller import DepthController
from lightning_decentral.partial.wire.reducer import Rank, Reducer
from lightning_decentral.planner.rehearsal.members.member import EqualReplicas, MemberPlace
from lightning_decentral.shared.updates import GradientCheck


class Cutting(EqualReplicas):
    """A worker whose backward stops at a cut; all take the same update.

    Raises:
        ValueError: here for workers with unequal batches, or a module whose backward isn't Lightning's; in the first
            forward for cuts that aren't (with the reason).
    """

    apart: ClassVar[bool] = False  # each worker's graph ends at a cut of its own

    def __init__(
        self, strategy: PartialBackpropStrategy, module: LightningModule, optimizer: Optimizer, place: MemberPlace
    ) -> None:
        refuse_unserved(module)
        super().__init__(module, place, GradientCheck(strategy.nonfinite))
        self._strategy, self._optimizer = strategy, optimizer
        self._depth = strategy.depth.timed(place.steps)
        if len({self._depth.share(rank, place.workers) for rank in range(place.workers)}) > 1:
            raise ValueError(f"{self._depth} asks for unequal batches, which a rehearsal has not: take Staircase")
        self._driver: DepthController | None = None
        self._reducer: Reducer | None = None
        self._step = -1

    def forward(self, step: int, *batch: Any) -> AbstractContextManager[None]:
        self._step = step
        if self._driver is None:
            self._drive(*batch)
        assert self._driver is not None
        return self._driver.together(step)

    def _drive(self, *batch: Any) -> None:
        run = run_of(self._module.trainer, *batch)

        def find() -> CutPlan:
            return search(self._module, self._strategy.cuts, self._strategy.balance, run)

        at = self._place
        plan = agreed(at.worker, at.broadcast, find)
        rank = Rank(at.worker, (1 / at.workers,) * at.workers)
        self._driver = DepthController(self._module, plan, self._depth, rank)
        most = self._strategy.bucket_bytes
        self._reducer = Reducer(self._driver.segments, rank, at.wire.group, at.wire.hosts, most)

    @contextmanager
    def backward(self) -> Iterator[None]:
        assert self._driver is not None
        assert self._reducer is not None
        with self._driver.bypass.lifted():
            self._reducer.refresh()
        self._reducer.begin(self._driver.contributors(self._step))
        yield
        self._driver.bypass.end()

    def average(self) -> None:
        assert self._driver is not None
        assert self._reducer is not None
        self._reducer.finish()
        settle(self._strategy.absent, self._optimizer, self._driver.absent(self._step))

    def release(self) -> None:
        if self._driver is not None and self._reducer is not None:
            self._driver.remove()
            self._reducer.close()

    @property
    def sent_bytes(self) -> float:
        return 0.0 if self._reducer is None else self._reducer.sent_bytes
