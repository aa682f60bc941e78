"""Selections of segments for fine-tuning (LISA, block coordinates): gradients flow through unselected segments."""

import random
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from lightning_decentral.partial.plan.depth import DepthAssignment, top
from lightning_decentral.shared.plan.arguments import at_least, checked


@checked
@dataclass(frozen=True, kw_only=True)
class Selection(DepthAssignment):
    """Assignment that trains chosen segments, the same on every worker; the backward ends at the lowest of them.

    Unchosen segments above it pass gradients on but get none. A tied parameter is trained with the highest segment
    that uses it; the backward then continues to the lowest."""

    whole: ClassVar[bool] = True

    @abstractmethod
    def chosen(self, step: int, segments: int) -> tuple[int, ...]:
        """Segments to train, from the bottom, at least one; `step` counts from the end of the warm-up."""

    def after(self, rank: int, size: int, step: int, segments: int) -> int:
        return segments - self.chosen(step, segments)[0]

    def trained(self, rank: int, size: int, step: int, segments: int) -> tuple[int, ...]:
        begun = step >= self.warm_up
        return self.chosen(step - int(self.warm_up), segments) if begun else top(segments, segments)


@checked
@dataclass(frozen=True, kw_only=True)
class Lisa(Selection):
    """LISA: train the lowest segment, the highest, and `blocks` of those between, drawn anew every `every` steps.

    With `cuts="blocks"` the lowest has the embeddings and the highest the head, which the paper always trains. Memory
    is saved only if the optimizer's state is dropped, too: `absent=Forget()`.

    Args:
        every: optimizer steps between draws, K in the paper.
        blocks: number drawn without replacement, all equally likely; gamma in the paper.
        seed: of the draws; the same on every worker.

    Raises:
        ValueError: no blocks, or no steps.

    Source: Pan et al. 2403.17919, algorithm 1.
    """

    every: int = 20
    blocks: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, "give the optimizer steps of a draw", every=self.every)
        at_least(1, "the paper trains 2 at a time", blocks=self.blocks)

    def chosen(self, step: int, segments: int) -> tuple[int, ...]:
        between = range(1, segments - 1)
        # A function of seed and draw: all workers agree without communication, also in a resumed run.
        drawn = random.Random(f"{self.seed}/{step // self.every}").sample(between, min(self.blocks, len(between)))
        return tuple(sorted({0, *drawn, segments - 1}))


@checked
@dataclass(frozen=True, kw_only=True)
class BlockCoordinate(Selection):
    """Block coordinate descent: train one segment for `every` steps, then the next, in a new random order each sweep.

    With Adam and `absent=Forget()`, which keeps only the current segment's optimizer state and begins it anew, this is
    BAdam.

    Args:
        every: optimizer steps on a segment, K in the paper.
        seed: of the orders; the same on every worker.

    Raises:
        ValueError: no steps.

    Source: Luo et al. 2404.02827, algorithm 1, with random reshuffling.
    """

    every: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, "the paper takes 50 to 100", every=self.every)

    def chosen(self, step: int, segments: int) -> tuple[int, ...]:
        sweep, place = divmod(step // self.every, segments)
        return (random.Random(f"{self.seed}/{sweep}").sample(range(segments), segments)[place],)
