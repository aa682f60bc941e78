"""Which gradients share a message: neighbours in backward with the same contributors and one type, if there is room."""

import torch
from torch import nn

from lightning_decentral.partial.wire.contributor_buckets import Packing

BOTH, FIRST = (0, 1), (0,)


def segment(*sizes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]


def test_segments_with_the_same_contributors_share_a_bucket() -> None:
    bottom, middle, top = segments = [segment(4), segment(2, 3), segment(5)]
    (whole,) = Packing(segments, None).buckets([BOTH] * 3)
    assert [id(p) for p in whole.parameters] == [id(p) for p in (*top, *reversed(middle), *bottom)], "as in backward"
    assert whole.bytes == 4 * 14
    upper, lower = Packing(segments, None).buckets([FIRST, BOTH, BOTH])
    assert (upper.ranks, lower.ranks) == (BOTH, FIRST)
    assert len(lower.parameters) == 1


def test_a_bucket_holds_what_it_has_room_for() -> None:
    segments = [segment(10), segment(10), segment(10)]
    sizes = [len(b.parameters) for b in Packing(segments, 2 * 4 * 10).buckets([BOTH] * 3)]
    assert sizes == [2, 1]


def test_types_travel_apart_in_the_order_in_which_backward_completes_them() -> None:
    """float64 lies in the top and in the bottom segment: its bucket is complete last."""
    wide = torch.float64
    segments = [segment(2, dtype=wide), segment(3), segment(4, dtype=wide)]
    kinds = [b.flat.dtype for b in Packing(segments, None).buckets([BOTH] * 3)]
    assert kinds == [torch.float32, wide]


def test_another_step_with_other_depths_uses_the_same_memory() -> None:
    packing = Packing([segment(4), segment(6)], None)
    (whole,) = packing.buckets([BOTH, BOTH])
    upper, lower = packing.buckets([FIRST, BOTH])
    whole.flat.fill_(1.0)
    assert float(upper.flat.sum() + lower.flat.sum()) == 4 + 6


def test_what_nobody_trains_takes_no_memory() -> None:
    packing = Packing([segment(1000), segment(6)], None)
    (upper,) = packing.buckets([(), BOTH])
    assert upper.flat.untyped_storage().nbytes() == 4 * 6
    assert sum(b.flat.numel() for b in packing.buckets([BOTH, BOTH])) == 1006
