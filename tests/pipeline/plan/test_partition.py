"""Partitions against brute force over every way to cut the blocks."""

import itertools
import random

import pytest

from lightning_decentral.pipeline import Counted, Even, Fastest
from lightning_decentral.pipeline.plan.partition import NOTHING
from lightning_decentral.shared.plan.profile import BlockCost


def load(seconds: float, parameter_bytes: int = 0) -> BlockCost:
    return BlockCost(forward_seconds=seconds / 4, backward_seconds=seconds * 3 / 4, parameter_bytes=parameter_bytes)


def brute(blocks, num_stages, embedding, head, max_bytes):
    best = None
    for cuts in itertools.combinations(range(1, len(blocks)), num_stages - 1):
        ends = [0, *cuts, len(blocks)]
        stages = [[*blocks[a:b]] for a, b in itertools.pairwise(ends)]
        stages[0].append(embedding)
        stages[-1].append(head)
        if max_bytes is not None and any(sum(part.parameter_bytes for part in stage) > max_bytes for stage in stages):
            continue
        slowest = max(sum(part.pass_seconds for part in stage) for stage in stages)
        best = slowest if best is None else min(best, slowest)
    return best


@pytest.mark.parametrize("seed", range(40))
def test_the_slowest_stage_is_as_fast_as_can_be(seed):
    generator = random.Random(seed)
    blocks = [load(generator.randint(1, 9), generator.randint(1, 5)) for _ in range(generator.randint(1, 8))]
    num_stages = generator.randint(1, len(blocks))
    embedding, head = load(generator.randint(0, 5), 3), load(generator.randint(0, 20), 4)
    max_bytes = generator.choice([None, 12, 20])
    wanted = brute(blocks, num_stages, embedding, head, max_bytes)
    if wanted is None:
        with pytest.raises(ValueError, match=f"can't hold the blocks with at most {max_bytes} bytes"):
            Fastest(max_bytes=max_bytes).counts(blocks, embedding, head, num_stages)
        return
    counts = Fastest(max_bytes=max_bytes).counts(blocks, embedding, head, num_stages)
    ends = [sum(counts[:r]) for r in range(num_stages + 1)]
    stages = [sum(b.pass_seconds for b in blocks[a:b]) for a, b in itertools.pairwise(ends)]
    stages[0] += embedding.pass_seconds
    stages[-1] += head.pass_seconds
    assert len(counts) == num_stages
    assert sum(counts) == len(blocks)
    assert min(counts) >= 1
    assert max(stages) == wanted


EQUAL = [load(1.0, 1)] * 7


@pytest.mark.parametrize("kind", [Even(), Fastest()])
def test_equal_blocks_are_spread_evenly(kind):
    for num_stages in range(1, 8):
        counts = kind.counts(EQUAL, NOTHING, NOTHING, num_stages)
        assert sum(counts) == 7
        assert max(counts) == -(-7 // num_stages)


def test_an_expensive_head_takes_blocks_off_the_last_stage():
    assert Fastest().counts([load(1.0)] * 8, NOTHING, load(3.0), 2) == (5, 3)


@pytest.mark.parametrize(("make", "words"), [
    (lambda: Even().counts(EQUAL, NOTHING, NOTHING, 8), "8 stages for a model of 7 blocks: use 1 to 7 stages"),
    (lambda: Fastest().counts(EQUAL, NOTHING, NOTHING, 0), "0 stages for a model of 7 blocks"),
    (lambda: Counted((3, 0)), r"every stage needs a block, got \(3, 0\)"),
    (lambda: Counted((3, 3)).counts(EQUAL, NOTHING, NOTHING, 2), r"2 stages and 6 blocks, but there are 2 .* 7"),
    (lambda: Counted((3, 4)).counts(EQUAL, NOTHING, NOTHING, 3), "2 stages and 7 blocks, but there are 3 stages"),
])  # fmt: skip
def test_what_cannot_be_is_said(make, words):
    with pytest.raises(ValueError, match=words):
        make()
