"""Planner of a run's slices: planned for each length of sequence when it first comes, the same on every stage."""

from collections.abc import Callable

import torch

from lightning_decentral.pipeline.compute.model import Call
from lightning_decentral.pipeline.plan.cost import StageCost, expected, priced
from lightning_decentral.pipeline.plan.schedule import Schedule, ScheduleForecast, forecast
from lightning_decentral.pipeline.plan.slicing import Situation, Slicing
from lightning_decentral.pipeline.wire.measure import profile
from lightning_decentral.pipeline.wire.stage_runner import StageRunner
from lightning_decentral.shared.wire.objects import gather_objects
from lightning_decentral.shared.wire.transport import Transport


class SlicePlanner:
    """Slices by size of micro-batch and length.

    Args:
        schedule: what the slices are planned for.
    """

    def __init__(self, schedule: Schedule, microbatches: int) -> None:
        self._schedule, self._microbatches = schedule, microbatches
        self.slices: dict[str, list[int]] = {}
        self.profiles: list[StageCost] = []
        """Measured costs of the stages, where the slicing measures."""
        self._measured = (0, 0, 0)
        self.stages: list[str] = []
        """Description of what each stage holds."""

    def plan(
        self, slicing: Slicing, call: Call, pipe: StageRunner, world: Transport | None, planned: Callable[[], None]
    ) -> list[int]:
        """The slices for such a call; planned where it's the first of its length and size. Collective over `world`.

        A slicing that measures takes gradients away: all stages' costs are measured, before every step where one is
        due. A measurement serves all sequences that aren't longer, of this batch size, with a mask or without, if it
        had one.

        Args:
            planned: called when a new plan is made.
        """
        length = pipe.model.length(call)
        if slicing.measures:
            # The first pipeline's call decides: others may be longer or shorter, but all must measure in the same step.
            batch, longest, masked = call.inputs.shape[0], length, int(call.attention_mask is not None)
            if world is not None and world.size > pipe.size:
                pending, rows = world.all_gather(torch.tensor((batch, longest, masked)))
                pending.wait()
                batch, longest, masked = rows[0].tolist()
            if batch != self._measured[0] or longest > self._measured[1] or masked > self._measured[2]:
                cost = profile(pipe, call)
                # The first pipeline's, so that a length has one plan.
                self.profiles = [cost] if world is None else gather_objects(world, cost)[: pipe.size]
                self._measured = batch, longest, masked
        key = f"{call.inputs.shape[0]} x {length}{'' if call.attention_mask is None else ', masked'}"
        if key not in self.slices:  # a length keeps its plan, also where a later measurement comes out otherwise
            self.slices[key] = list(slicing.slices(length, self.situation(pipe.size)))
            planned()
        return self.slices[key]

    def out_of_memory(self, stage: int) -> RuntimeError:
        """Error of a device whose memory wasn't enough: what the stages hold and what helps."""
        return RuntimeError(
            f"stage {stage} ran out of memory: take more slices or microbatches, activations=Recompute(), or "
            f"fewer blocks on this stage ({'; '.join(self.stages)})"
        )

    def situation(self, num_stages: int) -> Situation:
        """Situation that slices are planned for; without measurements a slice costs its length."""
        if self.profiles:
            return priced(self.profiles, self._schedule, self._microbatches)
        return Situation(
            num_stages=num_stages,
            seconds=lambda tokens, context: float(tokens),
            num_microbatches=self._microbatches,
            schedule=self._schedule,
        )

    def expected(self) -> ScheduleForecast | None:
        """Forecast of a step with the latest plan by its timeline; None where nothing was measured."""
        if not self.slices or not self.profiles:
            return None
        return expected(self.profiles, self._schedule, self._microbatches, [*self.slices.values()][-1])

    def summary(self) -> dict[str, str]:
        """Stages, slices, bubble and memory, as text."""
        slices, found = ([*self.slices.values()] or [[]])[-1], self.expected()
        sizes = len(self.stages), self._microbatches, max(1, len(slices))
        equal = forecast(self._schedule, *sizes, lambda action: 1.0)
        measured = f"; {found.bubble:.1%} and {found.seconds:.4g} s a step by measured costs" if found else ""
        errors = [cost.error for profile in self.profiles for cost in (profile.forward, profile.backward)]
        stretch = max((profile.stretch for profile in self.profiles), default=1.0)
        off = (
            f"at most {max(errors, default=0):.1%} off (root mean square), steps up to {stretch:.2f} times the "
            "timeline of their parts"
        )
        fitted = {"fit of the costs": off} if errors else {}
        held = ", ".join(map(str, equal.chunks_in_flight))
        return {
            **{f"stage {r}": text for r, text in enumerate(self.stages)},
            "slices": f"{len(slices)} of {', '.join(map(str, slices))} tokens" if slices else "not planned yet",
            "micro-batches": str(self._microbatches),
            "bubble": f"{equal.bubble:.1%} with slices of equal cost{measured}",
            **fitted,
            "memory": f"at most {held} slices of a sequence at once on stages 0, 1, ..",
        }
