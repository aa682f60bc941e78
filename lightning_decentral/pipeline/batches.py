"""Which sequences of a batch go together, and where each part is cut: planned jointly.

    t_i = seconds(b, l_i, l_1 + .. + l_(i-1));   T = sum over parts and slices of t + (P - 1) max t

More sequences in a part are larger operations and fewer slices that follow each other; the plan weighs both.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from lightning_decentral.pipeline.search import (
    Bounded,
    at_least_1,
    cheapest,
    lengths,
    over_bounds,
    piece_boundaries,
    table,
)

BatchSeconds = Callable[[int, int, int], float]


@dataclass(frozen=True)
class Part:
    """`batch` sequences that go together through the pipeline in these slices."""

    batch: int
    slices: tuple[int, ...]


def plan_batch(
    batch_size: int, length_tokens: int, num_stages: int, seconds: BatchSeconds, *, granularity: int = 1
) -> tuple[Part, ...]:
    """The parts of a batch, and the slices of each, that together minimise sum t + (num_stages - 1) max t.

        whole(B; t) = min_b { slices(b; t) + whole(B - b; t) }

    Args:
        seconds: seconds(batch, tokens, context) of one slice of so many sequences.

    Source: TeraPipe 2102.07988, section 3.4: the plan for every batch size, then a knapsack under the same bound.
    """
    boundaries = piece_boundaries(length_tokens, granularity)
    at_least_1(batch_size=batch_size, num_stages=num_stages)
    tables = {b: table(boundaries, partial(seconds, b)) for b in range(1, batch_size + 1)}

    def whole(bound: float) -> Bounded[tuple[Part, ...]] | None:
        found = {b: cheapest(costs, bound, len(boundaries)) for b, costs in tables.items()}
        parts = {b: (cuts.seconds, Part(b, lengths(boundaries, cuts))) for b, cuts in found.items() if cuts}
        return _knapsack(batch_size, parts)

    candidates = [cost for costs in tables.values() for cost in costs[costs < float("inf")].tolist()]
    parts = over_bounds(candidates, whole, num_stages - 1)
    assert parts is not None
    return parts


def _knapsack(total: int, parts: dict[int, tuple[float, Part]]) -> Bounded[tuple[Part, ...]] | None:
    best: list[Bounded[tuple[Part, ...]] | None] = [Bounded(0.0, ())]
    for size in range(1, total + 1):
        options = [
            Bounded(rest.seconds + cost, (*rest.found, part))
            for b, (cost, part) in parts.items()
            if b <= size and (rest := best[size - b]) is not None
        ]
        best.append(min(options, key=lambda option: option.seconds, default=None))
    return best[total]
