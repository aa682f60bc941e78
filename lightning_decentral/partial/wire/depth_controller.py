"""Partial backprop at run time, on one worker: the verified cuts in its module, and the cut of each step."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import nn

from lightning_decentral.partial.compute.bypass import Bypass
from lightning_decentral.partial.compute.cut import Cutter
from lightning_decentral.partial.compute.search import CutPlan
from lightning_decentral.partial.plan.depth import DepthAssignment, check, contributors
from lightning_decentral.partial.wire.reducer import Rank, factors


class DepthController:
    """Cuts `module` by the plan as the assignment says.

    Args:
        place: of this worker.

    Raises:
        ValueError: the assignment leaves a segment without contributors.
    """

    def __init__(self, module: nn.Module, plan: CutPlan, assignment: DepthAssignment, place: Rank) -> None:
        check(assignment, place.size, plan.segments)
        self.plan, self.assignment = plan, assignment
        self.rank, self.size, self.shares = place.rank, place.size, place.shares
        parameters = dict(module.named_parameters())
        self.segments: list[list[nn.Parameter]] = [[] for _ in range(plan.segments)]
        for name, segment in plan.segment_of.items():
            self.segments[segment].append(parameters[name])
        self.bypass = Bypass()
        """From a forward to the end of its backward."""
        self._cutter = Cutter(module, plan.boundaries)

    def remove(self) -> None:
        self.bypass.end()
        self._cutter.remove()

    def depth(self, step: int) -> int:
        """How many of the top segments this worker's backward goes through."""
        return self.plan.segments - self.lowest(self.trained(step))

    def lowest(self, trained: Sequence[int]) -> int:
        """The segment where the backward ends that trains these."""
        return min(map(self.plan.lowest_use, trained)) if self.assignment.whole else trained[0]

    def trained(self, step: int) -> tuple[int, ...]:
        """The segments that this worker trains, from the bottom."""
        return self.assignment.trained(self.rank, self.size, step, self.plan.segments)

    def contributors(self, step: int) -> list[tuple[int, ...]]:
        return contributors(self.assignment, self.size, step, self.plan.segments)

    def alone(self, step: int) -> AbstractContextManager[None]:
        """Cut for a worker whose gradients stay its own."""
        return self._at(step, None)

    def together(self, step: int) -> AbstractContextManager[None]:
        """Cut, and scale what crosses the boundaries so that a plain sum over workers is the contributors' mean."""
        return self._at(step, factors(self.contributors(step), self.shares))

    def _at(self, step: int, scales: Sequence[float] | None) -> AbstractContextManager[None]:
        own = self.trained(step)
        lowest = self.lowest(own)
        self.bypass.begin(p for s in range(lowest, self.plan.segments) if s not in own for p in self.segments[s])
        return self._cutter.at(lowest - 1 if lowest else None, scales)  # boundary j is between segments j and j + 1

    def absent(self, step: int) -> list[nn.Parameter]:
        """What no worker trains at this step, of what is trained at all."""
        found = zip(self.contributors(step), self.segments, strict=True)
        return [p for ranks, members in found if not ranks for p in members if p.requires_grad]

    def own_absent(self, step: int) -> list[nn.Parameter]:
        """What this worker doesn't train at this step."""
        own = self.trained(step)
        return [p for s, members in enumerate(self.segments) if s not in own for p in members if p.requires_grad]
