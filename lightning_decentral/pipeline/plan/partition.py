"""Pipeline partition: which blocks each stage gets (equal numbers, fastest slowest stage, or given numbers).

    min over cuts of  max over stages of (sum of the stage's block seconds + embedding or head of an outer stage)

Source: RaNNC 2103.16063 (blocks to stages by a dynamic program on measured times and memory)."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np

from lightning_decentral.shared.plan.arguments import at_least, checked
from lightning_decentral.shared.plan.linear_partition import linear_partition
from lightning_decentral.shared.plan.profile import BlockCost

NOTHING = BlockCost()


def weighed(parameter_bytes: int) -> BlockCost:
    """Cost of an unmeasured block: bytes stand in for seconds, as long as no block is measured."""
    return BlockCost(forward_seconds=float(parameter_bytes), parameter_bytes=parameter_bytes)


def refuse_more_stages_than_blocks(num_stages: int, num_blocks: int) -> None:
    """Raise ValueError for more stages than blocks: a stage without a block would only pass on its input."""
    if not 1 <= num_stages <= num_blocks:
        raise ValueError(f"{num_stages} stages for a model of {num_blocks} blocks: use 1 to {num_blocks} stages")


class Partition(ABC):
    """Policy that assigns blocks to stages; a frozen value that doesn't depend on the model."""

    @abstractmethod
    def counts(
        self, blocks: Sequence[BlockCost], embedding: BlockCost, head: BlockCost, num_stages: int
    ) -> tuple[int, ...]:
        """Number of blocks for each stage: positive, with sum `len(blocks)`."""


@dataclass(frozen=True)
class Even(Partition):
    """Equal numbers of blocks for each stage; left-over blocks go to the middle stages."""

    def counts(
        self, blocks: Sequence[BlockCost], embedding: BlockCost, head: BlockCost, num_stages: int
    ) -> tuple[int, ...]:
        refuse_more_stages_than_blocks(num_stages, len(blocks))
        few, more = divmod(len(blocks), num_stages)
        first = (num_stages - more) // 2  # the first and last stage have embedding and head
        return tuple(few + (first <= r < first + more) for r in range(num_stages))


@checked
@dataclass(frozen=True)
class Fastest(Partition):
    """Partition whose slowest stage is fastest, no stage over `max_bytes`; among equals, the least sum of squares.

    The embedding stands on the first stage, the head on the last. ValueError: no partition within `max_bytes`.

    Args:
        max_bytes: maximum bytes of parameters on one stage.
    """

    max_bytes: int | None = None

    def __post_init__(self) -> None:
        at_least(1, "leave it out for no limit", max_bytes=self.max_bytes)

    def counts(
        self, blocks: Sequence[BlockCost], embedding: BlockCost, head: BlockCost, num_stages: int
    ) -> tuple[int, ...]:
        refuse_more_stages_than_blocks(num_stages, len(blocks))
        count = len(blocks)
        costs = np.full((count + 1, count + 1), np.inf)
        for start, end in combinations(range(count + 1), 2):
            parts = [*([embedding] if start == 0 else []), *blocks[start:end], *([head] if end == count else [])]
            if self.max_bytes is None or sum(part.parameter_bytes for part in parts) <= self.max_bytes:
                costs[end, start] = sum(part.pass_seconds for part in parts)
        at = linear_partition(costs, num_stages)
        if at is None:
            raise ValueError(
                f"{num_stages} stages can't hold the blocks with at most {self.max_bytes:,} bytes of parameters each: "
                "take more stages or allow more"
            )
        return tuple(b - a for a, b in pairwise(at))


@checked
@dataclass(frozen=True)
class Counted(Partition):
    """Given numbers of blocks, one for each stage."""

    blocks: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", tuple(self.blocks))  # a list from a configuration
        if not self.blocks or min(self.blocks) < 1:
            raise ValueError(f"every stage needs a block, got {self.blocks}: give blocks=(1, 1, ...)")

    def counts(
        self, blocks: Sequence[BlockCost], embedding: BlockCost, head: BlockCost, num_stages: int
    ) -> tuple[int, ...]:
        if len(self.blocks) != num_stages or sum(self.blocks) != len(blocks):
            raise ValueError(
                f"blocks={self.blocks} is for {len(self.blocks)} stages and {sum(self.blocks)} blocks, but there are "
                f"{num_stages} stages and {len(blocks)} blocks: give one number for each stage, with the blocks as sum"
            )
        return self.blocks
