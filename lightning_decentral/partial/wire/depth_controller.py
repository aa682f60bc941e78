"""Partial backprop at run time, on one worker: the verified cuts in its module, and the cut of each step."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from lightning_decentral.partial.compute.cut import Cutter
from lightning_decentral.partial.compute.search import CutPlan
from lightning_decentral.partial.plan.cost import compute_fraction, memory_fraction
from lightning_decentral.partial.plan.depth import DepthAssignment, Memory, check, contributors
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
        self.memory: Memory = assignment.start(plan.segments)
        parameters = dict(module.named_parameters())
        self.segments: list[list[nn.Parameter]] = [[] for _ in range(plan.segments)]
        for name, segment in plan.segment_of.items():
            self.segments[segment].append(parameters[name])
        self._cutter = Cutter(module, plan.boundaries)

    def remove(self) -> None:
        self._cutter.remove()

    def depth(self, step: int) -> int:
        return self.assignment.depth(self.rank, self.size, step, self.plan.segments, self.memory)

    def contributors(self, step: int) -> list[tuple[int, ...]]:
        return contributors(self.assignment, self.size, step, self.plan.segments, self.memory)

    def alone(self, step: int) -> AbstractContextManager[None]:
        """Cut for a worker whose gradients stay its own."""
        return self._cutter.at(self._cut(step))

    def together(self, step: int) -> AbstractContextManager[None]:
        """Cut, and scale what crosses the boundaries so that a plain sum over workers is the contributors' mean."""
        return self._cutter.at(self._cut(step), factors(self.contributors(step), self.shares))

    def _cut(self, step: int) -> int | None:
        lowest = self.plan.segments - self.depth(step)
        return lowest - 1 if lowest else None  # boundary j lies between segments j and j + 1

    def absent(self, step: int) -> list[nn.Parameter]:
        """What no worker trains at this step, of what is trained at all."""
        found = zip(self.contributors(step), self.segments, strict=True)
        return [p for ranks, members in found if not ranks for p in members if p.requires_grad]

    def own_absent(self, step: int) -> list[nn.Parameter]:
        """What this worker doesn't train at this step."""
        lowest = self.plan.segments - self.depth(step)
        return [p for members in self.segments[:lowest] for p in members if p.requires_grad]

    def observe(self, step: int, norms: Callable[[], Sequence[float]], agree: Callable[[Any], Any]) -> None:
        """Let the assignment look at the gradients, if it wants to; `agree` hands worker 0's memory to all."""
        if not self.assignment.watches(step):
            return
        seen = norms()
        if all(map(math.isfinite, seen)):  # a loss scaler's overflow says nothing
            self.memory = tuple(agree(self.assignment.observe(step, seen, self.memory)))

    def forecast(self, depth: int) -> dict[str, float]:
        """Fractions of a full step: compute, saved activations, parameters trained."""
        costs = self.plan.costs
        sizes = [cost.parameter_bytes for cost in costs]
        return {
            "compute": compute_fraction(costs, depth),
            "saved": memory_fraction(costs, depth),
            "trained": sum(sizes[-depth:]) / sum(sizes),
        }
