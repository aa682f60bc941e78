"""Step time forecast of partial backprop from a profile: the backward stops at a cut, each block is a segment.

Depth d: forward of all blocks, backward of the top d, all-reduce and update of the trained ones."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from lightning_decentral.partial.plan.depth import DepthAssignment, Full, Temporal
from lightning_decentral.shared.plan import data_parallel
from lightning_decentral.shared.plan.forecast import (
    COUNTED_STEPS,
    WARM_STEPS,
    Floats,
    Method,
    Setting,
    at_factors,
    replica_bytes,
)
from lightning_decentral.shared.plan.network import Price
from lightning_decentral.shared.plan.profile import BlockCost
from lightning_decentral.shared.plan.timeline import Task, makespan, run

Trained = tuple[int, ...]  # segments, from the bottom


def cut(blocks: Sequence[BlockCost], trained: Trained) -> tuple[BlockCost, ...]:
    """Return the trained blocks unchanged, the blocks below forward only, and those between with half a backward."""
    passed = [block.backward_seconds / 2 if b > trained[0] else 0.0 for b, block in enumerate(blocks)]
    return tuple(
        block if b in trained else replace(block, backward_seconds=passed[b], update_seconds=0.0, parameter_bytes=0)
        for b, block in enumerate(blocks)
    )


@dataclass(frozen=True)
class PartialForecast(Method):
    """Forecast in which every step takes as long as the slowest worker, each at its own depth, then an all-reduce.

    A warm-up of fraction w of the run counts as w full steps + (1 - w) steady ones; a warm-up in steps only affects
    memory.
    A segment that only some workers train is assumed to cost as much as if all did."""

    equal: ClassVar[bool] = False

    depth: DepthAssignment = field(default_factory=Temporal)

    def prices(self, setting: Setting) -> tuple[Price, ...]:
        return data_parallel.DataParallel().prices(setting)

    def seconds(self, setting: Setting, factors: Floats) -> Floats:
        whole = self._whole
        steady = self._steady(setting, factors)
        full = replace(self, depth=Full())._steady(setting, factors) if whole else steady
        return whole * full + (1 - whole) * steady

    def _steady(self, setting: Setting, factors: Floats) -> Floats:
        runs, steps, workers = factors.shape
        trained = [self._trained(setting, step) for step in range(steps)]
        table: dict[Trained, Floats] = {}
        for own in set().union(*trained):
            table[own] = at_factors(lambda factor: makespan(run(self._step(setting, own, factor))), factors)  # noqa: B023
        last = np.zeros((runs, steps))
        for step in range(WARM_STEPS, steps):
            by_worker = [table[trained[step][rank]][:, step, rank] for rank in range(workers)]
            last[:, step] = np.max(by_worker, axis=0)
        return np.asarray(last[:, WARM_STEPS:].mean(axis=1), dtype=np.float64)

    def tasks(self, setting: Setting) -> list[Task[str]]:
        """Tasks of the deepest worker's first step."""
        return self._step(setting, min(self._trained(setting, 0)), 1.0)

    def card_bytes(self, setting: Setting) -> float:
        deepest = [min(self._trained(setting, step)) for step in range(COUNTED_STEPS)]
        trained = [sum(setting.model.blocks[b].parameter_bytes for b in own) for own in deepest]
        share = sum(trained) / len(trained) / max(1, setting.model.parameter_bytes)
        share = self._whole + (1 - self._whole) * share
        return share * data_parallel.DataParallel().card_bytes(setting)

    def memory_bytes(self, setting: Setting) -> float:
        """Memory at the largest depth; with a warm-up, at full depth."""
        segments = len(setting.model.blocks)
        reach = segments if self.depth.warm_up else self.depth.reach(setting.cluster.workers, segments)
        blocks = enumerate(setting.model.blocks, reach - segments)
        saving = tuple(block if place >= 0 else replace(block, saved_bytes=0) for place, block in blocks)
        return replica_bytes(replace(setting.model, blocks=saving)) + setting.model.parameter_bytes

    @property
    def _whole(self) -> float:
        """Fraction of the run at full depth."""
        # Unknown for a warm-up in steps: a forecast has no length of the run.
        return self.depth.warm_up if self.depth.warm_up < 1 else 0.0

    def _trained(self, setting: Setting, step: int) -> list[Trained]:
        """Segments that each worker trains at a step after the warm-up."""
        workers, segments = setting.cluster.workers, len(setting.model.blocks)
        steady = replace(self.depth, warm_up=0)
        return [steady.trained(r, workers, step, segments) for r in range(setting.cluster.simulated.workers)]

    def _step(self, setting: Setting, trained: Trained, factor: float) -> list[Task[str]]:
        return data_parallel.step(cut(setting.model.step_blocks, trained), self.prices(setting)[0], factor)
