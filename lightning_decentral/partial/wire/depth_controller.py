"""Controller of partial backprop on one worker: sets each step's cut in the module, at verified boundaries."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

from torch import nn
from torch.autograd import Variable
from torch.optim import Optimizer

from lightning_decentral.partial.compute.cut import Bypass, Cutter
from lightning_decentral.partial.compute.frozen_update import Absent, settle
from lightning_decentral.partial.compute.search import CutPlan
from lightning_decentral.partial.plan.depth import DepthAssignment, check, contributors
from lightning_decentral.partial.wire.reducer import Rank, Reducer
from lightning_decentral.shared.compute.device import DeviceSteps, Turn
from lightning_decentral.shared.wire.averaging.equal_replicas import EqualReplicas
from lightning_decentral.shared.wire.transport import Wire


class DepthController:
    """Cuts `module` at each step as the depth assignment requires. `place`: this worker's rank and share of the batch.
    ValueError: the assignment leaves a segment without contributors."""

    def __init__(self, module: nn.Module, plan: CutPlan, assignment: DepthAssignment, place: Rank) -> None:
        check(assignment, place.size, plan.segments)
        self.plan, self.assignment, self.place = plan, assignment, place
        parameters = dict(module.named_parameters())
        names = [[name for name, own in plan.segment_of.items() if own == s] for s in range(plan.segments)]
        self.segments = [[parameters[name] for name in own] for own in names]
        self.bypass = Bypass()  # active from a forward to the end of its backward
        self.step, self.contributors = -1, list[tuple[int, ...]]()  # state of the latest step that was cut
        self._cutter = Cutter(module, plan.boundaries)
        self.own(0)

    def remove(self) -> None:
        self.bypass.end()
        self._cutter.remove()

    def own(self, step: int) -> tuple[int, ...]:
        """Segments that this worker trains at this step; also updates `contributors`: computed once a step."""
        if step != self.step:
            self.step = step
            self.contributors = contributors(self.assignment, self.place.size, step, self.plan.segments)
        return tuple(s for s, ranks in enumerate(self.contributors) if self.place.rank in ranks)

    def depth(self, step: int) -> int:
        """Number of the top segments that this worker's backward goes through."""
        return len(self.segments) - self.lowest(self.own(step))

    def lowest(self, trained: Sequence[int]) -> int:
        """Segment where a backward that trains these segments ends."""
        return min(map(self.plan.lowest_use, trained)) if self.assignment.whole else trained[0]

    def alone(self, step: int) -> AbstractContextManager[None]:
        """Cut this step's backward on a worker that keeps its own gradients."""
        return self._cut(self.own(step), None)

    def together(self, step: int) -> AbstractContextManager[None]:
        """Cut, and scale gradients at the boundaries so that a plain sum over workers is the contributors' mean."""
        own = self.own(step)
        return self._cut(own, factors(self.contributors, self.place.shares))

    def _cut(self, own: Sequence[int], scales: Sequence[float] | None) -> AbstractContextManager[None]:
        lowest = self.lowest(own)
        self.bypass.begin(p for s, members in enumerate(self.segments) if s >= lowest and s not in own for p in members)
        return self._cutter.at(lowest - 1 if lowest else None, scales)  # boundary j is between segments j and j + 1

    def absent(self) -> list[nn.Parameter]:
        """Trainable parameters that no worker trains at the latest cut step."""
        found = zip(self.contributors, self.segments, strict=True)
        return [p for ranks, members in found if not ranks for p in members if p.requires_grad]

    def own_absent(self, step: int) -> list[nn.Parameter]:
        """Trainable parameters that this worker doesn't train at this step."""
        own = self.own(step)
        return [p for s, members in enumerate(self.segments) if s not in own for p in members if p.requires_grad]


def factors(contributors: Sequence[Sequence[int]], weights: Sequence[float]) -> list[float]:
    """Gradient factors of the boundaries between segments j and j + 1. They multiply a gradient that crossed all
    boundaries above segment s by W / W_s. A segment that no worker trains changes nothing."""
    sums = [float(sum(weights[rank] for rank in ranks)) for ranks in contributors]
    assert not sums[-1] or len(contributors[-1]) == len(weights), (
        "what lies above the last boundary is trained by all workers, or by none"
    )
    known = [float(sum(weights))]
    for own in reversed(sums):
        known.insert(0, own or known[0])
    return [above / below for below, above in pairwise(known[:-1])]


class CutSteps(DeviceSteps):
    """Runs steps whose backward stops at a cut, and averages their gradients segment by segment during the backward.
    `waiting`: context around waits for other workers."""

    def __init__(self, absent: Absent, waiting: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self.driver: DepthController | None = None
        self.reducer: Reducer | None = None
        self.turn = Turn()
        self._absent, self._waiting, self._blocked = absent, waiting, False

    def drive(self, driver: DepthController, wire: Wire | None, equal: EqualReplicas, bucket_bytes: int | None) -> None:
        """Start to use the cuts that were found. Collective."""
        if wire is not None:
            self.reducer = Reducer(driver.segments, driver.place, wire.group, wire.hosts, bucket_bytes)
            equal.join(self.reducer)
        self.driver = driver

    def train(self, module: Any, step: Callable[[], Any], redirect: Callable[[], Any]) -> Any:
        self.turn.take()
        return step()

    def before(self, loss: Any) -> None:
        self.begin()
        # Within the backward, where alone its end can be waited for: the update uses what the user's hooks see and
        # change afterwards.
        loss.register_hook(lambda _: Variable._execution_engine.queue_callback(self.end))

    def begin(self) -> None:
        """Prepare for a backward; only the last backward of an accumulated step sends gradients."""
        if self.reducer is not None and self.driver is not None and not self._blocked:
            with self.driver.bypass.lifted():
                self.reducer.refresh()
            self.reducer.begin(self.driver.contributors)

    def end(self) -> None:
        """Finish a backward: wait for the averaged gradients."""
        if self.driver is not None:
            self.driver.bypass.end()
        self.turn.give()
        if self.reducer is not None and not self._blocked:
            with self._waiting():
                self.reducer.finish()

    def settle(self, optimizer: Optimizer) -> None:
        """Apply `absent` to parameters that no worker trained in this step, before the optimizer's update."""
        if self.reducer is not None:
            self.reducer.serve([p for group in optimizer.param_groups for p in group["params"]])
        if self.driver is not None:
            settle(self._absent, optimizer, self.driver.absent())

    @contextmanager
    def blocked(self) -> Iterator[None]:
        self._blocked = True
        try:
            yield
        finally:
            self._blocked = False

    def close(self) -> None:
        """Restore the module as it was before the cuts."""
        if self.driver is not None:
            self.driver.remove()
        if self.reducer is not None:
            self.reducer.close()
        self.driver = self.reducer = None

    @property
    def sent_bytes(self) -> float:
        return 0.0 if self.reducer is None else self.reducer.sent_bytes

    @property
    def wait_seconds(self) -> float:
        return 0.0 if self.reducer is None else self.reducer.wait_seconds
