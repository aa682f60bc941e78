"""Step time forecast of partial backprop from a profile: the backward stops at a cut, each block is a segment.

depth d: forward of all, backward, all-reduce and update of the top d
"""

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


def cut(blocks: Sequence[BlockCost], depth: int) -> tuple[BlockCost, ...]:
    """The top `depth` blocks as they are, below them the forward only."""
    below = len(blocks) - depth
    bare = [replace(b, backward_seconds=0.0, update_seconds=0.0, parameter_bytes=0) for b in blocks[:below]]
    return (*bare, *blocks[below:])


@dataclass(frozen=True)
class PartialForecast(Method):
    """Every step as long as that of the worker that is last, each at its own depth, gradients all-reduced.

    A warm-up of a part w of the run counts as that part, w full steps + (1 - w) steady ones; one of some steps takes
    memory only. An assignment that looks at gradients is taken at its first depths.
    A segment that only some workers train is taken to cost what all of them would.
    """

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
        depths = [self._depths(setting, step) for step in range(steps)]
        table = {d: self._at(setting, d, factors) for d in set().union(*depths)}
        last = np.zeros((runs, steps))
        for step in range(WARM_STEPS, steps):
            by_worker = [table[depths[step][rank]][:, step, rank] for rank in range(workers)]
            last[:, step] = np.max(by_worker, axis=0)
        return np.asarray(last[:, WARM_STEPS:].mean(axis=1), dtype=np.float64)

    def tasks(self, setting: Setting) -> list[Task[str]]:
        """The first step of the deepest worker."""
        return self._step(setting, max(self._depths(setting, 0)), 1.0)

    def card_bytes(self, setting: Setting) -> float:
        depths = [max(self._depths(setting, step)) for step in range(COUNTED_STEPS)]
        trained = [sum(b.parameter_bytes for b in setting.model.blocks[-d:]) for d in depths]
        share = sum(trained) / len(trained) / max(1, setting.model.parameter_bytes)
        share = self._whole + (1 - self._whole) * share
        return share * data_parallel.DataParallel().card_bytes(setting)

    def memory_bytes(self, setting: Setting) -> float:
        """At the largest depth, which a warm-up makes the full one."""
        segments = len(setting.model.blocks)
        reach = segments if self.depth.warm_up else self.depth.reach(setting.cluster.workers, segments)
        below = sum(b.saved_bytes for b in setting.model.blocks[: segments - reach])
        return replica_bytes(setting.model) - below + setting.model.parameter_bytes

    @property
    def _whole(self) -> float:
        """The part of the run at full depth."""
        # Of a warm-up in steps nobody knows it: a forecast has no length of the run.
        return self.depth.warm_up if self.depth.warm_up < 1 else 0.0

    def _depths(self, setting: Setting, step: int) -> list[int]:
        workers, segments = setting.cluster.workers, len(setting.model.blocks)
        steady = replace(self.depth, warm_up=0)
        return [steady.depth(r, workers, step, segments, steady.start(segments)) for r in range(workers)]

    def _at(self, setting: Setting, depth: int, factors: Floats) -> Floats:
        return at_factors(lambda factor: makespan(run(self._step(setting, depth, factor))), factors)

    def _step(self, setting: Setting, depth: int, factor: float) -> list[Task[str]]:
        return data_parallel.step(cut(setting.model.blocks, depth), self.prices(setting)[0], factor)
