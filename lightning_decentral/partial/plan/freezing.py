"""Freezing schedules (FreezeOut, PipeTransformer, AutoFreeze): depths that only fall, the same on every worker."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_decentral.partial.plan.depth import DepthAssignment, Memory
from lightning_decentral.shared.plan.arguments import checked


def _positive(name: str, value: int, remedy: str) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1 step, got {value}: {remedy}")


@checked
@dataclass(frozen=True, kw_only=True)
class FreezeOut(DepthAssignment):
    """Segment i of L leaves when step / total_steps reaches f(t0 + (1 - t0) i / (L - 1)); f = cube or identity.

    The last never leaves. The learning rates stay the user's; the paper also lets each layer's fall to zero by a
    cosine that ends when it leaves.

    Args:
        total_steps: after the warm-up.
        first: t0, the fraction of the run after which the lowest segment leaves (before cubing).
        cubed: the paper's better variant, which gives the lower segments up earlier.

    Raises:
        ValueError: no steps, or a first outside of (0, 1].

    Source: Brock et al. 1706.04983, section 2.
    """

    total_steps: int
    first: float = 0.8
    cubed: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive("total_steps", self.total_steps, "give the optimizer steps of the run")
        if not 0 < self.first <= 1:
            raise ValueError(f"first must be in (0, 1], got {self.first}: 1 never freezes")

    def after(self, rank: int, size: int, step: int, segments: int, memory: Memory) -> int:
        ends = [self.first + (1 - self.first) * i / max(1, segments - 1) for i in range(segments - 1)]
        powers = [t**3 if self.cubed else t for t in ends]
        return 1 + sum(step < t * self.total_steps for t in powers)


@checked
@dataclass(frozen=True, kw_only=True)
class PipeTransformer(DepthAssignment):
    """frozen = ceil(L (1 - (1 - alpha)^T)) after T intervals of `every` steps, at most L - 1.

    Raises:
        ValueError: alpha outside of (0, 1), or an interval below one step.

    Source: He et al. 2102.03161, eq. 1: each interval freezes the fraction alpha of what is still trained.
    """

    every: int
    alpha: float = 1 / 3

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive("every", self.every, "the paper takes one epoch")
        if not 0 < self.alpha < 1:
            raise ValueError(f"alpha must be in (0, 1), got {self.alpha}: the paper takes 1/3")

    def after(self, rank: int, size: int, step: int, segments: int, memory: Memory) -> int:
        # 1e-9: a rounding upwards must not freeze one more
        frozen = math.ceil(segments * (1 - (1 - self.alpha) ** (step // self.every)) - 1e-9)
        return max(1, segments - frozen)


@checked
@dataclass(frozen=True, kw_only=True)
class AutoFreeze(DepthAssignment):
    """Freeze segments from the bottom whose gradient norm changes least: eta_s = |N_s' - N_s| / N_s'.

    N_s is the sum of ||mean gradient of segment s|| over an interval of `every` steps, N_s' that of the interval
    before. At the end of an interval the lowest trained segment is frozen if its eta is within the given percentile of
    the trained segments', then the next one, until one isn't. Never moves back.

    Raises:
        ValueError: a percentile outside of (0, 100], or an interval below one step.

    Source: Liu et al. 2102.01386, section 3.1 (there the norm is that of the summed gradient).
    """

    every: int
    percentile: float = 50.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive("every", self.every, "the paper takes a few per epoch")
        if not 0 < self.percentile <= 100:
            raise ValueError(f"percentile must be in (0, 100], got {self.percentile}: the paper takes 50")

    def after(self, rank: int, size: int, step: int, segments: int, memory: Memory) -> int:
        return segments - int(memory[0])

    def start(self, segments: int) -> Memory:
        """(frozen segments, sums of the interval before, sums of this one)."""
        return (0.0,) * (1 + 2 * segments)

    def watches(self, step: int) -> bool:
        return step >= self.warm_up

    def observe(self, step: int, norms: Sequence[float], memory: Memory) -> Memory:
        n, frozen = len(norms), int(memory[0])
        before, sums = memory[1 : 1 + n], [a + b for a, b in zip(memory[1 + n :], norms, strict=True)]
        if (step - self.warm_up + 1) % self.every:
            return (frozen, *before, *sums)
        return (self._frozen(frozen, before, sums), *sums, *([0.0] * n))

    def _frozen(self, frozen: int, before: Sequence[float], sums: Sequence[float]) -> int:
        if min(before[frozen:]) <= 0:  # the first interval, or a segment without gradients
            return frozen
        changes = [abs(b - s) / b for b, s in zip(before[frozen:], sums[frozen:], strict=True)]
        bound = _percentile(changes, self.percentile)
        unchanged = next((i for i, change in enumerate(changes) if change > bound), len(changes))
        return min(frozen + unchanged, len(sums) - 1)


def _percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of the values don't exceed."""
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]
